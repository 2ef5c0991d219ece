"""PyTorch's compiler bisector over this backend: which pass, or which operator on which engine, makes a program wrong.

    def works() -> bool:
        torch._dynamo.reset()
        return torch.allclose(torch.compile(model)(x), expected, rtol=1e-3)

    print(torch_hybrid_backend.bisect(works))
    # BisectionResult(backend='hybrid', subsystem='operators', bisect_number=17,
    #                 debug_info='aten.tanh.default (tanh_3) on tvm, model.py:12 in forward: ...')

The bisector runs `works` with eager, with aot_eager and with hybrid; where only hybrid is wrong it switches off passes, then
operators (they go to eager), and halves their number until one is left. `torch.compile` takes the backend from the bisector while
it runs, whatever the program names. The environment variables TORCH_BISECT_BACKEND=hybrid, TORCH_BISECT_SUBSYSTEM=passes or
operators, and TORCH_BISECT_MAX=n switch off all but the first n + 1 in any program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, Engine, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict

if TYPE_CHECKING:
    from torch._inductor.compiler_bisector import BisectionResult

BACKEND = "hybrid"
PASSES = "passes"
OPERATORS = "operators"


def bisect(works: Callable[[], bool]) -> BisectionResult | None:
    """Find what makes `works` false. It must compile anew in each call (`torch._dynamo.reset()` first).

    Returns PyTorch's BisectionResult: the backend, the subsystem ("passes" or "operators"), the number of the application of it
    that breaks the program, and in words which one that is; None where the program works with every backend. Also where
    every subsystem switched off leaves the program wrong, the result names the backend alone.
    """
    from torch._inductor import compiler_bisector

    # Ours before inductor: a program that only we break need not be compiled by inductor, nor would its faults hide ours.
    known = compiler_bisector.BACKENDS
    ours: list[Any] = [compiler_bisector.BisectSubsystem(PASSES), compiler_bisector.BisectSubsystem(OPERATORS)]
    order = {"eager": known["eager"], "aot_eager": known["aot_eager"], BACKEND: ours, "inductor": known["inductor"]}
    before = dict(known)
    known.clear()
    known.update(order)
    try:
        return compiler_bisector.CompilerBisector.do_bisect(works)
    finally:
        known.clear()
        known.update(before)


def _is_off(subsystem: str, what: Callable[[], str]) -> bool:
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.disable_subsystem(BACKEND, subsystem, what)


def is_running() -> bool:
    """Whether a bisector runs the program."""
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.bisection_enabled


def bisected_passes(
    passes: Sequence[tuple[Callable[..., bool], frozenset[str], str]],
) -> Sequence[tuple[Callable[..., bool], frozenset[str], str]]:
    """The passes less those that a running bisector has switched off."""
    if not is_running():
        return passes
    return [entry for entry in passes if not _is_off(PASSES, functools.partial(getattr, entry[0], "__name__"))]


def bisected_engines(engines: Sequence[Engine]) -> Sequence[Engine]:
    """The engines; while a bisector runs, each refuses the operators that the bisector has switched off."""
    return [_Bisected(engine) for engine in engines] if is_running() else engines


class _Bisected:
    """An engine as partitioning sees it, asked by a bisector before it takes an operator."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name
        self.devices = engine.devices
        self.keep_ops = engine.keep_ops
        self.draws = engine.draws
        self.keeps_deadline = engine.keeps_deadline

    def available(self) -> Verdict:
        return self._engine.available()

    def version(self, device: Device) -> str:
        return self._engine.version(device)

    def describe(self) -> Sequence[tuple[str, str]]:
        return self._engine.describe()

    def prepare(self, operators: int) -> None:
        self._engine.prepare(operators)

    def reads(self, spec: TensorSpec) -> TensorSpec:
        return self._engine.reads(spec)

    def supports(self, node: Node) -> Verdict:
        verdict = self._engine.supports(node)
        if verdict and _is_off(OPERATORS, lambda: f"{node.target} ({node.name}) on {self.name}{_source(node)}"):
            return Refused(Reason.DISABLED, "the compiler bisector has switched it off")
        return verdict

    def accepts(self, region: Region) -> Verdict:
        return self._engine.accepts(region)

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        return self._engine.compile(regions, deadline)


def _source(node: Node) -> str:
    """The user's line in one line, where it is known."""
    trace = node.meta.get("stack_trace")
    lines = [line.strip() for line in trace.splitlines() if line.strip()] if isinstance(trace, str) else []
    return ", " + " ".join(lines[-2:]) if lines else ""
