"""Devices as values: what of torch's they tell apart, and their text."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.tensor_spec import TensorSpec


def test_the_host_is_one_device_whatever_its_index() -> None:
    """torch tells "cpu" and "cpu:0" apart; they are one memory."""
    assert Device.of(torch.device("cpu")) == Device.of(torch.device("cpu", 0)) == CPU
    assert CPU.is_host


def test_devices_of_one_type_are_told_apart_by_index() -> None:
    """A device without an index is the first of its type."""
    first, second = Device.of(torch.device("cuda")), Device.of(torch.device("cuda", 1))
    assert first == Device("cuda", 0) != second
    assert not first.is_host


@pytest.mark.parametrize("device", [CPU, Device("cuda"), Device("cuda", 3), Device("meta")], ids=str)
def test_the_text_of_a_device_reads_back(device: Device) -> None:
    """`parse` is the inverse of `str`."""
    assert Device.parse(str(device)) == device


def test_specs_tell_the_index() -> None:
    """Equal tensors on two devices of one type have different specs."""
    with FakeTensorMode():
        specs = [TensorSpec.of(torch.empty(2, device=f"cuda:{index}")) for index in range(2)]
    assert [spec.device for spec in specs] == [Device("cuda", 0), Device("cuda", 1)]
    assert specs[0] != specs[1]
