"""What loaders yield, as calls of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.loader import Loader


class Recorder(nn.Module):
    """Counts its calls, and remembers its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append((x, mask))
        return x * 2 if mask is None else x * mask


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


X, LABEL = torch.ones(2, 3), torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (X, (X, None)),
        ([X, LABEL], (X, None)),
        ((X,), (X, None)),
        ({"x": X, "mask": X}, (X, X)),
        (({"x": X}, LABEL), (X, None)),
        (((X, X), LABEL), (X, X)),
    ],
)
def test_forms(item: Any, expected: tuple[Any, Any]) -> None:
    """A tensor, a tuple, a dict, and pairs of these with a label; a label is no argument that forward could do without."""
    model = Recorder()
    loader = Loader([item, item], model)
    model.calls.clear()
    loader.run(model)
    assert len(model.calls) == 2
    assert all(a is b for call in model.calls for a, b in zip(call, expected, strict=True))


def test_two_arguments_and_loaders_of_torch() -> None:
    """Where forward demands two arguments a pair is those; a DataLoader's pairs are an input and its label."""
    Loader([(torch.ones(2, 3), torch.ones(3, 4))], Two())
    model = Recorder()
    loader = Loader(DataLoader(TensorDataset(torch.ones(6, 3), torch.zeros(6)), batch_size=2), model)
    model.calls.clear()
    loader.run(model)
    assert [call[0].shape for call in model.calls] == [(2, 3)] * 3


def test_what_can_be_read_once_is_read_as_often_as_needed() -> None:
    """A generator serves several passes."""
    model = Recorder()
    loader = Loader((X for _ in range(2)), model)
    model.calls.clear()
    for _ in range(2):
        loader.run(model)
    assert len(model.calls) == 4


def _refused(items: list[Any], model: Callable[..., Any]) -> str:
    with pytest.raises(QuantizationError) as refused:
        Loader(items, model)
    return str(refused.value)


def test_errors_say_what_was_tried() -> None:
    """Items that forward does not take are described, with every form that was tried; an empty loader is told."""
    why = _refused([(torch.ones(2, 3), "cat")], Two())
    for part in ("a tuple of (a tensor of shape (2, 3)", "model(*item)", "model(item[0])", "must be a tensor"):
        assert part in why
    assert "y, z" in _refused([{"y": X, "z": X}], Recorder())
    assert "the loader is empty" in _refused([], Recorder())
