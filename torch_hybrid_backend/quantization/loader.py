"""Calibration data: what a loader yields, as calls of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.errors import QuantizationError

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


class Loader:
    """The items of an iterable, each as a call of a model: a tensor, a tuple or list of arguments, a dict of keyword arguments, or an
    (input, label) pair of an input of those forms. How they are taken is found with the first."""

    def __init__(self, items: Iterable[Any], model: nn.Module) -> None:
        # What can be read once only is kept: several passes may be needed.
        self._items = list(items) if isinstance(items, Iterator) else items
        self._call = self._form(model)

    def run(self, model: Callee) -> None:
        """Calls the model with every item."""
        with torch.no_grad():
            for item in self._items:
                self._call(model, item)

    def _form(self, model: nn.Module) -> Call:
        for item in self._items:
            failures = []
            for form in _forms(model, item):
                try:
                    with torch.no_grad():
                        form(model, item)
                except Exception as error:  # whatever a model raises for what it was not made for
                    failures.append(f"  {_SHOWN[form]}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
                else:
                    return form
            raise QuantizationError(
                f"the loader yields what forward does not take: {_described(item)}. Items must be a tensor, a tuple of arguments, a dict of "
                "keyword arguments, or an (input, label) pair of these; tried were\n" + "\n".join(failures)
            )
        raise QuantizationError("the loader is empty: calibration needs at least one item, some hundred are usual")


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
    """How many arguments forward has no defaults for."""
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
