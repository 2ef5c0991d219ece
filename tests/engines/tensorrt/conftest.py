"""Tests marked `tensorrt` need TensorRT: `make test-tensorrt` has it in an environment apart. Elsewhere they skip, and say what is missing."""

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
