"""Skip tests marked `tensorrt` where TensorRT is missing, and say what is missing. `make test-tensorrt` runs them in an environment of their
own."""

from __future__ import annotations

import pytest

from tests.engines.tensorrt import no_gpu  # noqa: F401  before anything imports torch_tensorrt
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.engines.tensorrt.installed import installation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = installation()
    if isinstance(found, Refused):
        for item in items:
            if item.get_closest_marker("tensorrt"):
                item.add_marker(pytest.mark.skip(reason=found.why))
