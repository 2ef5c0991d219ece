"""Calibration data: what a loader yields, as calls of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_hybrid_backend.arguments import described
from torch_hybrid_backend.errors import ArgumentError, QuantizationError, failures, is_out_of_memory, is_sticky
from torch_hybrid_backend.progress import Progress

Callee = Callable[..., Any]  # a module, or a function that stands for one
Call = Callable[[Callee, Any], Any]


def _as_keywords(model: Callee, item: Any) -> Any:
    return model(**item)


def _as_arguments(model: Callee, item: Any) -> Any:
    return model(*item)


def _alone(model: Callee, item: Any) -> Any:
    return model(item)


def _first_alone(model: Callee, item: Any) -> Any:
    return model(item[0])


def _first_as_keywords(model: Callee, item: Any) -> Any:
    return model(**item[0])


def _first_as_arguments(model: Callee, item: Any) -> Any:
    return model(*item[0])


_SHOWN: dict[Call, str] = {
    _as_keywords: "model(**item)",
    _as_arguments: "model(*item)",
    _alone: "model(item)",
    _first_alone: "model(item[0]), the item an (input, label) pair",
    _first_as_keywords: "model(**item[0]), the item an (input, label) pair",
    _first_as_arguments: "model(*item[0]), the item an (input, label) pair",
}


def check_loader(loader: object) -> None:
    """Raise ArgumentError for what can be a single input of a model, or cannot be read item by item."""
    if loader is None or (
        isinstance(loader, Iterable) and not isinstance(loader, torch.Tensor | np.ndarray | Mapping | str)
    ):
        return
    raise ArgumentError(
        f"quantize got {described(loader)} as its loader; it must yield inputs, one by one: a list of them, such as [x], or a DataLoader"
    )


class Loader:
    """The items of an iterable, each as a call of a model: a tensor, a tuple or list of arguments, a dict of keyword arguments, or an
    (input, label) pair of an input of those forms. How they are taken is found with the first."""

    def __init__(self, items: Iterable[Any], model: nn.Module) -> None:
        # What can be read once only is kept: several passes may be needed.
        self._items = list(items) if isinstance(items, Iterator) else items
        self._model = model
        self._count: int | None = None  # of items in the first pass
        self._call = self._form()

    def run(self, model: Callee, most: int | None = None) -> None:
        """Calls the model, or what stands for it, with every item, or with the first `most`. Raises QuantizationError for an item that forward
        does not take, and where there are not as many as in the first pass."""
        count = 0
        total = min((n for n in (self._total(), most) if n is not None), default=0)
        with torch.no_grad(), Progress("running the model on the loader", total) as progress:
            for item in self._items:
                if count == most:
                    return
                count += 1
                try:
                    self._call(model, item)
                except failures(Exception) as error:  # raised again, but for what is an item's fault
                    self._judge(error, item, count)
                    raise
                progress.step()
        # One was there when the form was found: a first pass without any is a later one of what can be read once only.
        if count == 0 or self._count not in (None, count):
            before = "at least 1" if self._count is None else self._count
            raise QuantizationError(
                f"the loader yields {count} items in a later pass and {before} in the first: calibration reads it several times, and it can "
                "be read once only, or its length changes. Pass a list of its items, or a DataLoader"
            )
        self._count = count

    def _total(self) -> int | None:
        """Number of items, as far as it is known before they are read."""
        return len(self._items) if isinstance(self._items, Sized) else self._count

    def _judge(self, error: Exception, item: Any, number: int) -> None:
        """Raises QuantizationError where an error is the item's fault: the model raises for it, too, without whatever else was run."""
        if _is_not_of_input(error):
            return
        try:
            self._call(self._model, item)
        except failures(Exception) as own:  # whatever a model raises
            if _is_not_of_input(own):
                return
            raise QuantizationError(
                f"item {number} of the loader is not what forward takes: {_described(item)}. Every item must have the form of the first, which "
                f"is taken by {_SHOWN[self._call]}; it raises {_told(own)}"
            ) from own

    def _form(self) -> Call:
        for item in self._items:
            failed: dict[Call, Exception] = {}
            for form in _forms(self._model, item):
                try:
                    with torch.no_grad():
                        form(self._model, item)
                except failures(Exception) as error:  # whatever a model raises for what it was not made for
                    if _is_not_of_input(error):
                        raise
                    failed[form] = error
                else:
                    return form
            tried = "\n".join(f"  {_SHOWN[form]}: {_told(error)}" for form, error in failed.items())
            raise QuantizationError(
                f"item 1 of the loader is not what forward takes: {_described(item)}. Items must be a tensor, a tuple of arguments, a dict of "
                f"keyword arguments, or an (input, label) pair of these; tried were\n{tried}"
            ) from next(iter(failed.values()))
        raise QuantizationError("the loader is empty: calibration needs at least one item, some hundred are usual")


def _is_not_of_input(error: Exception) -> bool:
    """True if an error says all itself, or tells of the machine."""
    return isinstance(error, QuantizationError) or is_out_of_memory(error) or is_sticky(error)


def _told(error: Exception) -> str:
    """Its kind and the first line of its text."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _forms(model: nn.Module, item: Any) -> list[Call]:
    if isinstance(item, Mapping):
        return [_as_keywords, _alone]
    if not isinstance(item, list | tuple) or not item:
        return [_alone]
    if len(item) != 2:
        return [_as_arguments, _alone]
    first: list[Call] = [_first_alone]
    if isinstance(item[0], Mapping):
        first = [_first_as_keywords, _first_alone]
    elif isinstance(item[0], list | tuple):
        first = [_first_as_arguments, _first_alone]
    # Two things: two arguments where forward demands two, else an input and its label.
    return [_as_arguments, *first] if _demanded(model) >= 2 else [*first, _as_arguments]


def _demanded(model: nn.Module) -> int:
    """Number of arguments for which forward has no defaults."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _described(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"a tensor of shape {tuple(item.shape)}, {item.dtype}"
    if isinstance(item, Mapping):
        return f"a {type(item).__name__} of {', '.join(map(str, item))}"
    if isinstance(item, list | tuple):
        return f"a {type(item).__name__} of ({', '.join(map(_described, item))})"
    return f"a {type(item).__name__}"
