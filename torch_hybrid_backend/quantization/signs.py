"""Values of a run that cannot be negative, by the functions that made them: those are quantised to all 256 steps from 0 on.

It is told of every function of torch's as it runs, in eager and while Dynamo traces it, so that both quantise alike: a mode sees the same
names in both (`functions.py`), and Dynamo's graph has what it shows no mode (`traced.py`). What no mode sees in eager (TorchScript, functions
in C++) is noticed by the versions of the tensors that it writes to; in the inference mode they have none, and it is not noticed.
`passes.cpu.quantize_layers` asks the same of graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from torch_hybrid_backend.quantization import traced
from torch_hybrid_backend.quantization.functions import NEVER_NEGATIVE, SHARES_MEMORY, Function, is_in_place, may_write

# A branch that reads an earlier value reads one of the last; a longer list would only take longer to search.
_REMEMBERED = 64

# By name, written in place or not: what is never negative where its numbers are not, and where its inputs are not.
_BY_BOUNDS = frozenset("hardtanh clamp clamp_min clip".split())
_BY_NUMBERS = frozenset("threshold _threshold softplus".split())
_KEEPS = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d silu leaky_relu elu gelu dropout mean sum sqrt "
    "flatten reshape view permute transpose t squeeze unsqueeze expand contiguous clone float bfloat16 half __getitem__ getitem "
    "pixel_shuffle pixel_unshuffle channel_shuffle".split()
)
_KEEPS_OF_BOTH = frozenset("add mul div maximum".split())
_JOINS = frozenset("cat concat concatenate stack".split())

# The version of a tensor that is freed: it still counts as one of the last, as it does to Dynamo, which does not know.
_GONE = -1
# A tensor, which this keeps nobody from freeing, and its version when it was last known; None where it has none (in the inference mode), or
# where Dynamo traces.
Known = tuple[weakref.ref[torch.Tensor], int | None]


class Signs:
    """The values that cannot be negative, of one run."""

    def __init__(self) -> None:
        self._known: list[Known] = []
        self._is_traced = False
        # Others may write to memory at any time: nothing is known any more.
        self._is_shared = False

    def never_negative(self, x: Any) -> bool:
        """True if a tensor is one of them; a number, whether it is not below 0."""
        if not isinstance(x, torch.Tensor):
            return isinstance(x, int | float) and x >= 0
        if self._is_shared:
            return False
        if any(known() is x for known, _ in reversed(self._known)):
            return True
        if self._is_traced and traced.may_know_more():
            x.detach()
            return bool(traced.is_never_negative())
        return False

    def begins(self, function: Function) -> str:
        """A function of torch's is about to run. Returns its name, for `ended`."""
        name: str
        name, has_written, self._is_traced = traced.begins(function)
        if has_written:
            self._known = []
        elif not self._is_traced:
            self._known = [one for one in self._known if one[1] is None or _version(one[0]) in (one[1], _GONE)]
        return name

    def ended(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a function's result after the function ran."""
        in_place = is_in_place(name)
        plain = name[:-1] if in_place else name
        is_never = self._is_never(plain, args, kwargs)
        # What is written to may be seen through views of it: unless signs stay, nothing is known any more.
        has_written = not is_never and plain not in _KEEPS and may_write(name, args, kwargs)
        if has_written:
            self._known = []
        elif not self._is_traced:  # it may have written what is not negative
            self._known = [(known, _version(known)) for known, _ in self._known]
        if name in SHARES_MEMORY:
            self._is_shared = True
        # Integers may wrap, and a view of another dtype reads bits.
        if is_never and isinstance(result, torch.Tensor) and result.is_floating_point():
            known = weakref.ref(result)
            self._known = [*self._known[1 - _REMEMBERED :], (known, None if self._is_traced else _version(known))]
        if self._is_traced:
            traced.ended(has_written)

    def _is_never(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if name in NEVER_NEGATIVE:
            return True
        first = args[0] if args else kwargs.get("tensors" if name in _JOINS else "input")
        options = [*args[1:], *(value for key, value in kwargs.items() if key not in ("input", "tensors"))]
        if name in _BY_BOUNDS:
            low = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("min_val"))
            bounds = [
                option for option in options if option is not None
            ]  # where the upper one is the lower, it is the result
            return isinstance(low, int | float) and all(map(self.never_negative, bounds))
        if name in _BY_NUMBERS:
            return not may_write(name, args, kwargs) and all(map(self.never_negative, options))
        if name in _KEEPS:
            if name == "view" and any(isinstance(option, torch.dtype) for option in options):
                return False
            # What sums are divided by may be given.
            is_divided = name.startswith("avg_pool") and any(
                isinstance(option, int) and option < 0 for option in options
            )
            return self.never_negative(first) and not is_divided
        if name in _KEEPS_OF_BOTH:
            return not kwargs and all(map(self.never_negative, args))
        if name in _JOINS:
            return all(map(self.never_negative, first or ()))
        return False


def _version(known: weakref.ref[torch.Tensor]) -> int | None:
    """Number of times that a tensor has been written to, by itself or through what shares its memory."""
    x = known()
    if x is None:
        return _GONE
    return None if x.is_inference() else x._version
