"""Items of loaders, as calls of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.loader import Loader
from torch_hybrid_backend.quantization.quantize import quantize


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
    """A pair is two arguments where forward demands two; a DataLoader's pairs are an input and its label."""
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
    for part in (
        "item 1",
        "a tuple of (a tensor of shape (2, 3)",
        "model(*item)",
        "model(item[0])",
        "must be a tensor",
    ):
        assert part in why
    assert "model(item): TypeError: " in _refused(["junk"], nn.Linear(3, 4))  # the text, not a list of its lines
    assert "y, z" in _refused([{"y": X, "z": X}], Recorder())
    assert "the loader is empty" in _refused([], Recorder())


@pytest.mark.parametrize(
    ("item", "described"), [("junk", "a str"), (torch.ones(2, 5), "shape (2, 5)"), (None, "a NoneType")]
)
@pytest.mark.parametrize("label", [None, LABEL])
def test_a_later_item_that_forward_does_not_take_is_told_by_its_number(item: Any, described: str, label: Any) -> None:
    """With one error, which has the model's own behind it; so it is where something else stands for the model."""
    model = nn.Linear(3, 4)
    loader = Loader([X, item] if label is None else [(X, label), (item, label)], model)
    for callee in (model, functools.partial(model)):
        with pytest.raises(QuantizationError, match="item 2 of the loader is not what forward takes") as refused:
            loader.run(callee)
        assert described in str(refused.value)
        assert isinstance(refused.value.__cause__, TypeError | RuntimeError)
        assert type(refused.value.__cause__).__name__ in str(refused.value)
    with pytest.raises(QuantizationError, match="item 2"):
        quantize(model.eval(), [X, item], calibration="naive")


@pytest.mark.parametrize(
    "error", [QuantizationError("NaN"), KeyboardInterrupt(), MemoryError(), ZeroDivisionError("a collector's")]
)
def test_errors_that_are_not_of_an_item_pass(error: BaseException) -> None:
    """Findings while calibrating, interrupts, a lack of memory, and what the model alone does not raise stay what they are."""

    def fail(_: torch.Tensor) -> None:
        raise error

    with pytest.raises(type(error)) as passed:
        Loader([X, X], Recorder()).run(fail)
    assert passed.value is error


def test_a_lack_of_memory_at_the_first_item_passes() -> None:
    """The form of the item is not to blame."""

    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise MemoryError("a terabyte")

    with pytest.raises(MemoryError, match="a terabyte"):
        Loader([X], Greedy())


class Once:
    """Can be read once only, and does not say so."""

    def __init__(self, count: int) -> None:
        self._items = (X for _ in range(count))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._items


class OnceInside(Once):
    """The same behind a generator of its own, by which the other one ends early."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self._items


class Shorter:
    """Has an item less each time."""

    def __init__(self) -> None:
        self._count = 9

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._count -= 1
        return iter([X] * self._count)


@pytest.mark.parametrize("items", [lambda: Once(1), lambda: Once(3), lambda: OnceInside(3), Shorter])
def test_passes_of_other_lengths_are_refused(items: Callable[[], Any]) -> None:
    """Ranges would be of other data or of none where a later pass has another number of items: the model does not stay float in silence."""
    with pytest.raises(
        QuantizationError, match=r"yields \d items in a later pass .*Pass a list of its items, or a DataLoader"
    ):
        quantize(nn.Linear(3, 4).eval(), items(), calibration="naive")
