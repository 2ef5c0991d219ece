"""Which values of a run cannot be negative, by the operators that made them: those are quantised to all 256 steps from 0 on.

It is told of every function of torch's as it runs, in eager and while Dynamo traces it, so that both quantise alike: a mode sees the same
names in both, of the functions below. (Dynamo shows no mode `torch.relu_` and its like, called by themselves, nor `functional.threshold`; and
neither shows what an operator of `torch.ops` writes.) `passes.cpu.quantize_layers` asks the same of graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

Function = Callable[..., Any]

# A branch that reads an earlier value reads one of the last; a longer list would only take longer to search.
_REMEMBERED = 64

# By name, written in place or not. What is never negative whatever it is given (NaN apart), and what is where its inputs are not.
_NEVER = frozenset("relu relu6 sigmoid abs exp square softmax softplus".split())
_BY_LOWER_BOUND = frozenset("hardtanh clamp clamp_min clip".split())
_KEEPS = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d silu leaky_relu elu gelu dropout mean sum sqrt "
    "flatten reshape view permute transpose t squeeze unsqueeze expand contiguous clone float bfloat16 half __getitem__ getitem "
    "pixel_shuffle pixel_unshuffle channel_shuffle".split()
)
_KEEPS_OF_BOTH = frozenset("add mul div maximum".split())
_JOINS = frozenset("cat concat concatenate stack".split())
# Functions with an argument `inplace` that may make negative numbers of others.
MAY_WRITE = frozenset(
    "_threshold hardtanh celu selu rrelu mish alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
)


# These have the names of others, and Dynamo shows them to no mode.
_UNSEEN = (functional.sigmoid,)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(function: Function) -> str:
    # By a call at the time of tracing: Dynamo itself knows the names of some kinds of functions only.
    return "" if function in _UNSEEN else str(function.__name__)


class Signs:
    """The values that cannot be negative, of one run. Tensors are kept alive by nobody for it."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def never_negative(self, x: Any) -> bool:
        """Whether a tensor is one of them; a number, whether it is not below 0."""
        if isinstance(x, torch.Tensor):
            return any(known() is x for known in reversed(self._known))
        return isinstance(x, int | float) and x >= 0

    def ran(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of torch's ran."""
        name = _name(function)
        is_in_place = name.endswith("_") and not name.endswith("__")
        plain = name[:-1] if is_in_place else name
        is_never = self._is_never(plain, args, kwargs)
        # What is written to may be seen through views of it: unless signs stay, nothing is known any more.
        writes = (
            is_in_place
            or name in MAY_WRITE
            or name in ("__setitem__", "__set__")
            or name.startswith("__i")
            or "out" in kwargs
        )
        if writes and not is_never and plain not in _KEEPS:
            self._known = []
        # Integers may wrap, and a view of another dtype reads bits.
        if is_never and isinstance(result, torch.Tensor) and result.is_floating_point():
            self._known = [*self._known[1 - _REMEMBERED :], weakref.ref(result)]

    def _is_never(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if name in _NEVER:
            return True
        if name in _BY_LOWER_BOUND:
            low = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("min_val"))
            return isinstance(low, int | float) and low >= 0
        if name in _KEEPS:
            return self.never_negative(args[0]) and not any(isinstance(arg, torch.dtype) for arg in args)
        if name in _KEEPS_OF_BOTH:
            return not kwargs and all(map(self.never_negative, args))
        if name in _JOINS:
            return all(map(self.never_negative, args[0]))
        return False
