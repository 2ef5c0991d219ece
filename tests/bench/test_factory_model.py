"""A user's model as work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from torch_hybrid_backend.bench.factory_model import FactoryModel
from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.factory import Factory

SCRIPT = """
import random
import numpy as np
import torch
def make():
    return torch.nn.Linear(3, 3), (torch.randn(2, 3) * random.random() * np.random.rand(),)
def with_batch(batch=7):
    return (lambda x: x + 1), (torch.zeros(batch, 3), )
def elsewhere():
    return torch.nn.Linear(3, 3, device="meta"), (torch.zeros(2, 3),)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FactoryModel:
    path = tmp_path / "script_for_factory_model.py"
    path.write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))  # restored after the test
    return FactoryModel(factory=Factory(f"{path}:make"), threads=1, folder=tmp_path)


def _of(work: FactoryModel, name: str, batch: int | None = None) -> FactoryModel:
    place, _, _ = work.factory.target.rpartition(":")
    return dataclasses.replace(work, factory=Factory(f"{place}:{name}"), batch=batch)


def test_it_is_the_same_every_time(work: FactoryModel) -> None:
    """The model and inputs are the same in every process, whichever library draws the random numbers. Inputs stay as they are without a batch
    size."""
    (first, inputs), (second, again) = work.build(), work.build()
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(inputs.args[0], again.args[0])
    assert inputs.batch == 2
    assert work.calibration(inputs) == [inputs]


def test_batches(work: FactoryModel) -> None:
    """The factory's parameter `batch` has priority; otherwise inputs are repeated or cut."""
    assert dataclasses.replace(work, batch=5).build()[1].batch == 5
    model, inputs = _of(work, "with_batch", 4).build()
    assert inputs.batch == 4
    assert torch.equal(inputs.call(model), torch.ones(4, 3))
    assert not model.training  # a function has no mode
    assert _of(work, "with_batch").build()[1].batch == 7


def test_another_device_is_refused(work: FactoryModel) -> None:
    """Tensors on another device than the CPU are refused."""
    with pytest.raises(ArgumentError, match="returned tensors on meta; hybrid bench measures on the CPU"):
        _of(work, "elsewhere").build()
