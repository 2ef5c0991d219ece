"""The engine protocol's own words."""

from __future__ import annotations

import pytest

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import serves
from torch_hybrid_backend.engines.eager import EagerEngine


@pytest.mark.parametrize("device", [CPU, Device("cuda", 1), Device("meta")], ids=str)
def test_engines_serve_types_of_devices(device: Device) -> None:
    """Whatever the index; eager, which names none, serves every one."""
    assert serves(FakeEngine(devices=["cuda"]), device) == (device.type == "cuda")
    assert serves(EagerEngine(), device)
