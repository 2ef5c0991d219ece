"""Checks of what users hand to the functions of this package. Each raises ArgumentError: what was given, what is legal, what to do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.errors import ArgumentError


def check_model(model: object, function: str) -> None:
    """Raise ArgumentError unless `model` can be called: a module or a function, but no class."""
    if isinstance(model, type):
        raise ArgumentError(f"{function} got the class {model.__name__}; pass an instance of it: {model.__name__}(...)")
    if not callable(model):
        raise ArgumentError(
            f"{function} got {described(model)}; its first argument must be a model (torch.nn.Module) or a function"
        )


def check_module(model: object, function: str) -> None:
    """Raise ArgumentError unless `model` is a module, and one that torch.compile did not make."""
    if is_compiled(model):
        raise ArgumentError(
            f"{function} got a compiled model; pass the model that was given to torch.compile, then compile what {function} returns"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{function} got {described(model)}; its first argument must be a model (torch.nn.Module)")


def check_metric(metric: object, function: str) -> None:
    """Raise ArgumentError unless `metric` is None or can be called."""
    if metric is not None and not callable(metric):
        raise ArgumentError(
            f"{function} got {described(metric)} as its metric; it must be a function that takes a module and returns how good it is: higher "
            "is better"
        )


def is_compiled(model: object) -> bool:
    """True if `torch.compile` returned it."""
    from torch_hybrid_backend.torch_private import OptimizedModule  # takes a second to import

    return isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")


def uncompiled(model: Any) -> Any:
    """The module or function that `torch.compile` was given; `model` itself if `torch.compile` did not return it."""
    return getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))


def check_seconds(value: object, name: str) -> None:
    """Raise ArgumentError unless `value` is None or a number of seconds that is not negative."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise ArgumentError(
            f"{name} is {value!r}; it must be a number of seconds, 0 or more, or None to wait without limit"
        )


def described(value: Any) -> str:
    """A value in a message, for example "the str 'resnet50'", "a Linear", "a tensor of shape (2, 3)"."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, str | int | float):
        return f"the {type(value).__name__} {value!r}" if value is not None else "None"
    return f"a {type(value).__name__}"
