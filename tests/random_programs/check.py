"""A program compiled, and what distinguishes it from eager."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.random_programs.program import Module, Program, widths
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

# The first goes through the Python executor, the second is the C++ plan's first, the third finds everything warm.
CALLS = 3


@dataclass(frozen=True)
class Report:
    """`why` tells what differs, "" where nothing does. `operators` counts those of all graphs, `taken` those that the engine ran."""

    why: str
    operators: int
    taken: int


def check(program: Program, engine: str, cache_dir: Path) -> Report:
    """Run the program compiled by the engine, forced and unverified ("": the backend as users have it), and compare it with float64 and eager.

    Outputs and the inputs' final contents: dtypes, shapes and strides equal eager's, what is no float equals it, and floats lie as near to the
    float64 run as the program's tolerances say. What shares memory in eager does so here.
    """
    config = _settings(engine, cache_dir)
    plans: list[Plan] = []
    with _forced(config):
        why = _fault(program, functools.partial(compile_graph, config=config, on_plan=plans.append))
    nodes = [node for plan in plans for node in plan.nodes]
    return Report(why, len(nodes), sum(node.engine == (engine or "tvm") for node in nodes))


def _settings(engine: str, cache_dir: Path) -> Config:
    options: dict[str, object] = {"placement": "estimate", "cache_dir": cache_dir, "compile_threads": 2}
    if engine:
        options |= {"engines": engine, "strict": True, "verify": "off"}
    return Config().with_options(options, None)


def fails_upstream(program: Program) -> bool:
    """Whether torch's own aot_eager, which runs the captured graph as it is, fails on it as well."""
    return bool(_fault(program, "aot_eager"))


def _fault(program: Program, backend: Any) -> str:
    expected, exact = _eager(program), _wide(program)
    torch._dynamo.reset()
    run = torch.compile(Module(program), backend=backend, dynamic=False)
    try:
        for call in range(CALLS):
            found = _differences(program, _call(run, program), expected, exact)
            if found:
                return f"call {call + 1}: {found}"
    except Exception as error:  # whatever a compiled program raises, the program as written did not
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return ""


@contextlib.contextmanager
def _forced(config: Config) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if config.engines:  # estimates would leave regions this small to eager
            stack.enter_context(mock.patch("torch_hybrid_backend.partition.placement.eager_us", return_value=math.inf))
        yield


@dataclass(frozen=True)
class _Results:
    """A call's outputs followed by its inputs as it left them."""

    tensors: tuple[torch.Tensor, ...]


def _call(run: Any, program: Program) -> _Results:
    given = [item.tensor() for item in program.inputs if not item.weight]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = run(*given)
    return _Results((*outputs, *given))


def _eager(program: Program) -> _Results:
    return _call(Module(program), program)


def _wide(program: Program) -> list[torch.Tensor]:
    with widths(True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = program.tensors(wide=True)
        outputs = program.function(wide=True)(*given)
    return [*outputs, *(t for t, item in zip(given, program.inputs, strict=True) if not item.weight)]


def _differences(program: Program, actual: _Results, expected: _Results, exact: Sequence[torch.Tensor]) -> str:
    names = [*program.outputs, *(item.name for item in program.inputs if not item.weight)]
    if len(actual.tensors) != len(expected.tensors):
        return f"{len(actual.tensors)} results instead of {len(expected.tensors)}"
    for name, got, want, true in zip(names, actual.tensors, expected.tensors, exact, strict=True):
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"{name} is {got.dtype} {list(got.shape)}, eager's {want.dtype} {list(want.shape)}"
        if want.numel() and _meaningful(got) != _meaningful(want) and _meaningful(got) != _told_strides(program, name):
            return f"{name} has strides {got.stride()}, eager's {want.stride()} (shape {list(want.shape)})"
        if not want.dtype.is_floating_point:
            if not torch.equal(got, want):
                return f"{name} differs from eager's in {int((got != want).sum())} of {want.numel()} elements"
            continue
        error = _largest(got, true)
        allowed = program.tolerances[name] if name in program.tolerances else _careless(want, true)
        if not error <= allowed:
            return f"{name} ({want.dtype}) is off by {error:.3g}, eager by {_largest(want, true):.3g}, allowed is {allowed:.3g}"
    if _sharing(actual.tensors) != _sharing(expected.tensors):
        pairs = zip(names, _sharing(actual.tensors), _sharing(expected.tensors), strict=True)
        differing = [f"{n} with {names[a]}, eager's with {names[b]}" for n, a, b in pairs if a != b]
        return f"what shares memory differs: {'; '.join(differing[:4])}"
    return ""


def _told_strides(program: Program, name: str) -> list[int]:
    """What PyTorch's own metadata say: where operands' strides contradict each other, they differ from what its kernels do (2.13)."""
    with FakeTensorMode() as mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = program.function()(*map(mode.from_tensor, program.tensors()))
    told = dict(zip(program.outputs, outputs, strict=True)).get(name)
    return [] if told is None else _meaningful(told)


def _careless(want: torch.Tensor, true: torch.Tensor) -> float:
    """For values that `minimise` made inputs: nobody knows how errors grow from there."""
    return 20 * _largest(want, true) + 100 * torch.finfo(want.dtype).eps * max(
        1.0, float(true.abs().max()) if true.numel() else 0.0
    )


def _meaningful(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _largest(got: torch.Tensor, true: torch.Tensor) -> float:
    difference = (got.double() - true).abs()
    return float(difference.max()) if difference.numel() else 0.0  # NaN where one of them is: no tolerance covers that


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the first that lies in the same memory."""
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage().data_ptr() if t.numel() else -k - 1, k) for k, t in enumerate(tensors)]
