"""A function called many times, compiled and in eager, and everything a caller could notice compared.

The TVM engine is forced and strict: a region it cannot compile, fails to run or gets wrong raises instead of falling back. Arguments
are made by a function that is called anew for each run, so that a run may write to them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

Make = Callable[[], "tuple[Any, ...]"]

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float64: 1e-9, torch.complex128: 1e-9}


@dataclass(frozen=True)
class Compiled:
    """A compiled function, and the plans made so far."""

    call: Callable[..., Any]
    plans: list[Plan]

    @property
    def taken(self) -> int:
        """The number of operators that the engine runs."""
        return sum(node.engine == "tvm" for plan in self.plans for node in plan.nodes)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Estimates would leave regions as small as these to eager: here they say that eager takes for ever."""
    with mock.patch("torch_hybrid_backend.partition.placement.eager_us", return_value=math.inf):
        yield


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = False, strict: bool = True, **options: Any
) -> Compiled:
    """The function compiled; nothing happens before its first call, which should be made under `forced`."""
    plans: list[Plan] = []
    config = Config.from_env(os.environ).with_options({"strict": strict, "placement": "estimate"}, None)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    return Compiled(torch.compile(function, backend=backend, dynamic=dynamic, **options), plans)


def check(
    function: Callable[..., Any],
    *makers: Make,
    takes: bool = True,
    times: int = 3,
    dynamic: bool | None = False,
    backward: bool = False,
) -> Compiled:
    """Call the function on what each maker makes, `times` times in turn: the first call of a graph is checked and placed, the second
    is its C++ plan's first.

    takes: whether the engine must run some of it, or none. backward: compare the gradients of all inputs too. Compared are values,
    types, dtypes, shapes, strides, requires_grad, which results share memory with which others and with the arguments, which are the very
    same object, and what the call left in the arguments.
    """
    torch._dynamo.reset()
    fast = compiled(function, dynamic=dynamic)
    with forced():
        for make in (make for make in makers for _ in range(times)):
            arguments, mine = make(), make()
            want = observe(function, arguments, backward)
            got = observe(fast.call, mine, backward)
            assert_same(got, want)
    assert (fast.taken > 0) == takes, f"the engine runs {fast.taken} operators"
    return fast


@dataclass(frozen=True)
class Observed:
    """The results of a call and its effects: `leaves` are those of the result and of the arguments, in order. `gradients` may have any
    strides."""

    leaves: list[Any]
    form: str
    memory: list[tuple[int, int]]
    same_object: list[int]
    gradients: list[torch.Tensor | None]


def observe(call: Callable[..., Any], arguments: tuple[Any, ...], backward: bool = False) -> Observed:
    """Call it and look at everything."""
    result = call(*arguments)
    outputs, form = tree_flatten(result)
    inputs = tree_flatten(arguments)[0]
    gradients: list[torch.Tensor | None] = []
    if backward:
        roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        weights = [torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape) for t in roots]
        gradients = list(torch.autograd.grad(roots, leaves, weights, allow_unused=True)) if roots and leaves else []
    both = [*outputs, *inputs]
    return Observed(both, str(form), _memory(both), _same_object(both), gradients)


def _memory(leaves: Sequence[Any]) -> list[tuple[int, int]]:
    """For each tensor the first that lies in the same storage, and how many bytes behind it."""
    first: dict[int, tuple[int, int]] = {}
    places = []
    for number, leaf in enumerate(leaves):
        if not _has_memory(leaf):
            places.append((number, 0))
            continue
        key = leaf.untyped_storage()._cdata
        owner, start = first.setdefault(key, (number, leaf.data_ptr()))
        places.append((owner, leaf.data_ptr() - start))
    return places


def _has_memory(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and leaf.numel() > 0
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
    )


def _same_object(leaves: Sequence[Any]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), k) if isinstance(leaf, torch.Tensor) else k for k, leaf in enumerate(leaves)]


def assert_same(got: Observed, want: Observed) -> None:
    """Assert that the compiled call gave and left what the function gave and left."""
    assert got.form == want.form
    assert len(got.leaves) == len(want.leaves)
    for number, (a, b) in enumerate(zip(got.leaves, want.leaves, strict=True)):
        assert type(a) is type(b), f"leaf {number} is a {type(a)}, eager's a {type(b)}"
        if not isinstance(b, torch.Tensor):
            assert repr(a) == repr(b), f"leaf {number} is {a!r}, eager's {b!r}"
            continue
        assert_same_tensor(a, b, f"leaf {number}")
    for number, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert (a is None) == (b is None), f"gradient {number}"
        if a is not None and b is not None:
            assert_same_tensor(a.contiguous(), b.contiguous(), f"gradient {number}")
    assert got.memory == want.memory, "what shares memory"
    assert got.same_object == want.same_object, "which results are the same object"


def assert_same_tensor(got: torch.Tensor, want: torch.Tensor, what: str = "the tensor") -> None:
    """Equal form, and values as near as kernels come to eager's."""
    for attribute in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf", "is_quantized"):
        assert getattr(got, attribute) == getattr(want, attribute), f"{what}: {attribute} is {getattr(got, attribute)}"
    if want.layout is torch.strided and want.numel():
        kept = [k for k, size in enumerate(want.shape) if size > 1]
        assert [got.stride(k) for k in kept] == [want.stride(k) for k in kept], (
            f"{what}: strides {got.stride()}, eager's {want.stride()}"
        )
        assert got.is_conj() == want.is_conj()
    tolerance = TOLERANCE.get(want.dtype, 1e-5) if want.is_floating_point() or want.is_complex() else 0.0
    torch.testing.assert_close(
        got.detach(), want.detach(), rtol=10 * tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
