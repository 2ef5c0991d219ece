"""PyTorch's compiler bisector over this backend: what in it makes a program wrong.

    print(torch_hybrid_backend.bisect(model, x))
    # BisectionResult(backend='hybrid', subsystem='operators', bisect_number=17,
    #                 debug_info='aten.tanh.default (tanh_3) on tvm, model.py:12 in forward: ...')

    def works() -> bool:
        torch._dynamo.reset()
        return torch.allclose(torch.compile(model)(x), expected, rtol=1e-3)

    print(torch_hybrid_backend.bisect(works))

The bisector runs the program with eager, with aot_eager and with hybrid; where only hybrid is wrong it switches off passes, then operators
(they go to eager), then what capture does (decompositions, the partitioner of training, fixes of AOTAutograd's graphs), and halves their
number until one is left. `torch.compile` takes the backend from the bisector while it runs, whatever the program names. The environment
variables TORCH_BISECT_BACKEND=hybrid, TORCH_BISECT_SUBSYSTEM=passes, operators or capture, and TORCH_BISECT_MAX=n switch off all but the first
n + 1 in any program.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from torch_hybrid_backend.arguments import check_model
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, Engine, LinkedLibrary, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.torch_private import BackendCompilerFailed, reset_dynamo, same, tree_leaves

if TYPE_CHECKING:
    from torch_hybrid_backend.torch_private import compiler_bisector

_log = logging.getLogger(__name__)

BACKEND = "hybrid"
PASSES = "passes"
OPERATORS = "operators"
CAPTURE = "capture"

_TOLERANCE = 1e-3  # of PyTorch's own benchmarks in training


def bisect(program: Callable[..., Any], *args: Any, **kwargs: Any) -> compiler_bisector.BisectionResult | None:
    """Find what makes a program wrong.

    With arguments `program` is a model, or any function: it is wrong where `torch.compile(program)(*args, **kwargs)` raises, or is not what
    `program(*args, **kwargs)` is, under the settings of the environment. In grad mode gradients are compared, too. Each run has a copy of the
    model and the arguments, and the same random numbers. Without arguments `program` says itself whether it works; it must compile anew in
    each call (`torch._dynamo.reset()` first).

    Returns PyTorch's BisectionResult: the backend, the subsystem ("passes", "operators" or "capture"), the number of the application of it
    that breaks the program, and in words which one that is; None where the program works with every backend. Also where
    every subsystem switched off leaves the program wrong, the result names the backend alone.
    """
    check_model(program, "bisect")
    from torch_hybrid_backend.torch_private import compiler_bisector

    # Ours before inductor: a program that only we break need not be compiled by inductor, nor would its faults hide ours. Capture last: without
    # decompositions other operators are run, which would hide the fault of one.
    known = compiler_bisector.BACKENDS
    ours: list[Any] = [compiler_bisector.BisectSubsystem(name) for name in (PASSES, OPERATORS, CAPTURE)]
    order = {"eager": known["eager"], "aot_eager": known["aot_eager"], BACKEND: ours, "inductor": known["inductor"]}
    before = dict(known)
    works = functools.partial(_agrees, program, args, kwargs) if args or kwargs else program

    def works_if_captured() -> bool:
        try:
            return bool(works())
        except BackendCompilerFailed:
            if compiler_bisector.CompilerBisector.get_subsystem() != CAPTURE:
                raise
            return False  # PyTorch cannot trace some operators whole

    known.clear()
    known.update(order)
    try:
        return compiler_bisector.CompilerBisector.do_bisect(works_if_captured)
    finally:
        known.clear()
        known.update(before)


def _agrees(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the program compiled does what it does in eager."""
    expected = _results(program, args, kwargs, lambda program: program)
    reset_dynamo()
    try:
        results = _results(program, args, kwargs, torch.compile)
    except failures(Exception):  # whatever compiled programs raise: this one does not in eager
        return False
    return bool(same(expected, results, tol=_TOLERANCE, equal_nan=True, log_error=_log.info))


def _results(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Callable[..., Callable[..., Any]]
) -> list[torch.Tensor]:
    """The tensors among the outputs of `made(program)`, called once, and in grad mode the gradients of their sum."""
    program, args, kwargs = copy.deepcopy((program, args, kwargs))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = [each for each in tree_leaves(made(program)(*args, **kwargs)) if isinstance(each, torch.Tensor)]
    sums = [output.abs().sum() for output in outputs if output.requires_grad]
    gradients: list[torch.Tensor] = []
    if sums:
        parameters = program.parameters() if isinstance(program, torch.nn.Module) else ()
        leaves = [each for each in (*parameters, *tree_leaves((args, kwargs))) if _is_trained(each)]
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [output.detach() for output in outputs] + gradients


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def applied_in_capture() -> Callable[[str], bool] | None:
    """Question of capture, while a bisector runs, before it does what its argument names (`capture.aot.capture`)."""
    return (lambda what: not _is_off(CAPTURE, lambda: what)) if is_running() else None


def _is_off(subsystem: str, what: Callable[[], str]) -> bool:
    from torch_hybrid_backend.torch_private import compiler_bisector

    return compiler_bisector.CompilerBisector.disable_subsystem(BACKEND, subsystem, what)


def is_running() -> bool:
    """True if a bisector runs the program."""
    from torch_hybrid_backend.torch_private import compiler_bisector

    return compiler_bisector.CompilerBisector.bisection_enabled


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

    def compiles(self) -> Verdict:
        return self._engine.compiles()

    def version(self, device: Device) -> str:
        return self._engine.version(device)

    def describe(self) -> Sequence[tuple[str, str]]:
        return self._engine.describe()

    def prepare(self, operators: int) -> None:
        self._engine.prepare(operators)

    def reads(self, spec: TensorSpec) -> TensorSpec:
        return self._engine.reads(spec)

    def keeps_packed(self, weights: Node) -> bool:
        return self._engine.keeps_packed(weights)

    def link(self, libraries: Sequence[str]) -> LinkedLibrary | None:
        return self._engine.link(libraries)

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
