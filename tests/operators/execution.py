"""Calls in eager and compiled, compared.

A sample is captured once and made into a `HybridGraph` for each mode:

- "tvm" (or another engine's name): the engine forced. Estimates that would leave a region to eager are overruled, islands between
  eager operators are not given up, nothing is verified behind the test's back, and what fails raises (`strict`).
- "default": the backend as users have it, but for timing: placement is by estimate.
- "numbers": the TVM engine, forced, with all sizes and the call's numbers known only at run time: it is called with the sample's numbers, and
  then with others (`numbers`).

Each graph runs twice: the first call goes through the Python executor, the second through the C++ plan. Operators are handed to the
backend through AOTAutograd directly; modules, and what cannot be traced so, through Dynamo. The kernels of many samples are compiled
together (`engines_for_tests`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.interpreter.backend import InterpreterBackend
from tests.operators.engines_for_tests import BatchedEngine
from tests.operators.numbers import Numbered
from tests.operators.values import copied, difference, form_difference, lazy, seed, tensors_of, widened
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import Target

Call = Callable[..., Any]

DEFAULT, NUMBERS = "default", "numbers"
# Of samples run together that cannot be traced as one graph: those take seconds, and come to the same.
_MAX_THROUGH_DYNAMO = 4
PASSED, WRONG, ERROR, SKIPPED, UPSTREAM = "passed", "wrong", "error", "skipped", "upstream"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a sample in one mode. `status`: "passed"; "wrong" (the result differs from eager's); "error" (the compiled call raised,
    eager did not); "skipped" (eager itself raised, or the sample cannot be compared); "upstream" (torch's own aot_eager backend fails as well).
    `taken` counts the operators that the engine ran, `refused` tells those it did not: (operator, code, sentence)."""

    status: str
    why: str = ""
    taken: int = 0
    refused: tuple[tuple[str, str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Subject:
    """The callable of a task. `state`: parameters and buffers of a module, which every call finds as they were made and whose gradients or
    final values count as results; `wide` makes the same in float64."""

    call: Call
    wide: Callable[[], Subject]
    state: tuple[torch.Tensor, ...] = ()
    saved: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def of_function(call: Call) -> Subject:
        return Subject(call, lambda: Subject.of_function(call))

    @staticmethod
    def of_module(module: torch.nn.Module) -> Subject:
        state = (*module.parameters(), *module.buffers())
        saved = tuple(tensor.detach().clone() for tensor in state)
        return Subject(module, lambda: Subject.of_module(copy.deepcopy(module).double()), state, saved)


@dataclass(frozen=True, slots=True)
class Sample:
    """A call. `is_random`: only the form of the results counts; `direct`: without Dynamo, where the call can be traced so; `brief`: in the
    first mode only."""

    subject: Subject
    arguments: Any
    backward: bool = False
    is_random: bool = False
    direct: bool = True
    brief: bool = False


class Bench:
    """Runs samples in each mode. Owns the engines, and with them the compiler processes."""

    def __init__(self, cache_dir: Path, compilers: int, modes: Sequence[str] = ("tvm", DEFAULT)) -> None:
        self.modes = tuple(modes)
        self.dynamo_left = _MAX_THROUGH_DYNAMO
        self._mode = ""
        options: dict[str, object] = {
            "placement": "estimate",
            "cache": False,
            "cache_dir": cache_dir,
            "compile_threads": compilers,
        }
        self._config = Config().with_options(options, None)
        strict = self._config.with_options({"strict": True, "verify": "off"}, None)
        # Regions of views alone are worth nothing to users, and a test of views' lowerings.
        self._strict = dataclasses.replace(strict, min_region_nodes=0)
        services = open_services(
            dataclasses.replace(self._config, cache=True)
        )  # of kernels, not of captures and timings
        tvm = BatchedEngine(TvmBackend(), self._config, services)
        interpreter = BatchedEngine(InterpreterBackend(), self._config, services)
        triton = BatchedEngine(TritonBackend(Target(90, 4, is_interpreted=True)), self._config, services)
        engines = {"tvm": tvm, DEFAULT: tvm, NUMBERS: tvm, "interpreter": interpreter, "triton": triton}
        self._engines = {engines[mode] for mode in self.modes}
        self._sessions = {mode: Session((engines[mode], EagerEngine()), services) for mode in self.modes}
        self._keep_ops = engines[self.modes[0]].keep_ops

    def run(self, samples: Sequence[Sample]) -> Iterator[dict[str, Outcome]]:
        """The outcomes of each sample by mode, in order; kernels of all of them are compiled together."""
        self.dynamo_left = _MAX_THROUGH_DYNAMO
        runs = [_Run(sample, self) for sample in samples]
        for engine in self._engines:
            engine.flush()
        for run in runs:
            yield run.outcomes()

    def graphs(self, plans: dict[str, list[Plan]]) -> Callable[..., Any]:
        """A Dynamo backend: one capture, made into a graph for each mode; `in_mode` says which of them runs."""

        def compile_captured(captured: CapturedGraph) -> Callable[[list[Any]], Any]:
            made: dict[str, HybridGraph] = {}
            for mode, found in plans.items():
                twin = torch.fx.GraphModule(captured.graph_module, copy.deepcopy(captured.graph_module.graph))
                own = CapturedGraph(twin, captured.kind, captured.static_inputs)
                with self.in_mode(mode):
                    made[mode] = HybridGraph(own, self._sessions[mode], self.config(mode), found.append)

            def run(inputs: list[Any]) -> list[Any]:
                return made[self._mode or self.modes[0]](inputs)

            return run

        return lambda gm, inputs: capture(gm, inputs, compile_captured, self._keep_ops)

    def config(self, mode: str) -> Config:
        return self._config if mode == DEFAULT else self._strict

    @contextlib.contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        """Graphs are made and run as `mode` demands."""
        before, self._mode = self._mode, mode
        try:
            if mode == DEFAULT:
                yield
            else:
                with (
                    mock.patch("torch_hybrid_backend.partition.placement.eager_us", return_value=math.inf),
                    mock.patch("torch_hybrid_backend.partition.regions.ISLAND_NODES", 0),
                ):
                    yield
        finally:
            self._mode = before


class _Run:
    """A sample that is called in eager and captured when made, run in each mode by `outcomes`."""

    def __init__(self, sample: Sample, bench: Bench) -> None:
        self._sample = sample
        self._bench = bench
        modes = bench.modes[:1] if sample.brief else bench.modes
        self._all_plans: dict[str, list[Plan]] = {mode: [] for mode in modes}
        self._plans = {mode: plans for mode, plans in self._all_plans.items() if mode != NUMBERS}
        self._skipped = ""
        self._compiled: Call | None = None
        try:
            self._expected = _results(sample.subject.call, sample)
        except Exception as error:  # the sample is meant to fail, or needs what is not here
            self._skipped = _sentence(error)
            return
        if not tensors_of(self._expected):
            self._skipped = "no tensor comes out"
            return
        if not self._plans:
            return
        backend = bench.graphs(self._plans)
        if sample.direct:
            try:
                self._compiled = _traced(sample, backend)
                return
            except Exception as error:  # what depends on data, say: Dynamo breaks the graph there
                for plans in self._plans.values():
                    plans.clear()
                bench.dynamo_left -= 1
                if bench.dynamo_left < 0:
                    self._skipped = f"not traced as one graph, as others of these samples: {_sentence(error)}"
                    return
        self._compiled = torch.compile(sample.subject.call, backend=backend, dynamic=False)

    def outcomes(self) -> dict[str, Outcome]:
        if self._skipped:
            return dict.fromkeys(self._all_plans, Outcome(SKIPPED, self._skipped))
        torch._dynamo.reset()  # Dynamo gives up on code that it has compiled often
        return {mode: self._numbers() if mode == NUMBERS else self._outcome(mode) for mode in self._all_plans}

    def _numbers(self) -> Outcome:
        """The worst of the calls with each of the sample's numbers."""
        plans = self._all_plans[NUMBERS]
        numbered = Numbered(self._sample.subject.call, self._sample.arguments)
        subject = Subject.of_function(numbered.call)
        torch._dynamo.reset()
        compiled = torch.compile(numbered.call, backend=self._bench.graphs({NUMBERS: plans}), dynamic=True)
        calls = 0
        with torch._dynamo.config.patch(recompile_limit=64):
            for words, arguments in numbered.variants():
                sample = dataclasses.replace(self._sample, subject=subject, arguments=arguments)
                try:
                    expected = _results(sample.subject.call, sample)
                except Exception:  # what eager raises for, kernels may compute
                    continue
                calls += 1
                try:
                    with self._bench.in_mode(NUMBERS):
                        actual = _results(compiled, sample)
                except Exception as error:
                    status = UPSTREAM if _fails_with_numbers(sample) else ERROR
                    return Outcome(status, words + _sentence(error), *_share(plans, "tvm"))
                if why := _difference(actual, expected, sample):
                    status = UPSTREAM if _fails_with_numbers(sample) else WRONG
                    return Outcome(status, words + why, *_share(plans, "tvm"))
        return Outcome(PASSED if calls else SKIPPED, "" if calls else "no number goes in", *_share(plans, "tvm"))

    def _outcome(self, mode: str) -> Outcome:
        status, why = PASSED, ""
        assert self._compiled is not None
        try:
            for _ in range(2):
                with self._bench.in_mode(mode):
                    actual = _results(self._compiled, self._sample)
                why = why or self._differs(actual)
            status = WRONG if why else PASSED
        except Exception as error:
            status, why = ERROR, _sentence(error)
        if status != PASSED and self._fails_upstream():
            status = UPSTREAM
        return Outcome(status, why, *_share(self._plans[mode], "tvm" if mode == DEFAULT else mode))

    def _differs(self, actual: Any) -> str:
        return _difference(actual, self._expected, self._sample)

    def _fails_upstream(self) -> bool:
        """True if torch's own aot_eager backend gets it wrong, too."""
        from torch._dynamo.backends.debugging import aot_eager

        try:
            if self._sample.direct:
                compiled = _traced(self._sample, aot_eager)
            else:
                torch._dynamo.reset()
                compiled = torch.compile(self._sample.subject.call, backend="aot_eager", dynamic=False)
            return bool(self._differs(_results(compiled, self._sample)))
        except Exception:
            return True


class Flat(torch.nn.Module):
    """A call as a function of the tensors among its arguments, to the tensors among its results."""

    def __init__(self, call: Call, arguments: Any) -> None:
        super().__init__()
        self._call = call
        self._leaves, self._form = tree_flatten(arguments)
        self._positions = [k for k, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        self._results: list[Any] = []
        self._results_form: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        results, self._results_form = tree_flatten(self._call(*tree_unflatten(leaves, self._form)))
        self._results = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in results]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in results]
        return tuple(leaf for leaf in results if isinstance(leaf, torch.Tensor))

    def results(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The call's result, given its tensors."""
        found = iter(tensors)
        leaves = [
            next(found) if is_tensor else leaf for is_tensor, leaf in zip(self._is_tensor, self._results, strict=True)
        ]
        return tree_unflatten(leaves, self._results_form)


def _difference(actual: Any, expected: Any, sample: Sample) -> str:
    """The difference of a call's results from eager's, in words; "" where they do not."""
    if sample.is_random:
        return _forms(actual, expected)
    return difference(actual, expected, lambda: _exact(sample))


def _exact(sample: Sample) -> Any:
    try:
        wide = sample.subject.wide()
        return _results(wide.call, dataclasses.replace(sample, subject=wide, arguments=widened(sample.arguments)))
    except Exception:  # not every operator takes float64
        return None


def _fails_with_numbers(sample: Sample) -> bool:
    """True if torch's own aot_eager backend gets it wrong, too, with sizes and numbers known only at run time."""
    torch._dynamo.reset()
    try:
        compiled = torch.compile(sample.subject.call, backend="aot_eager", dynamic=True)
        return bool(_difference(_results(compiled, sample), _results(sample.subject.call, sample), sample))
    except Exception:
        return True


def _traced(sample: Sample, backend: Callable[..., Any]) -> Call:
    own = copied(sample.arguments)
    flat = Flat(sample.subject.call, own)
    seed()
    with warnings.catch_warnings(), torch.set_grad_enabled(sample.backward):
        warnings.simplefilter("ignore")
        compiled = backend(flat, tensors_of(own))

    def call(*arguments: Any) -> Any:
        return flat.results(compiled(*tensors_of(arguments)))

    return call


def _share(plans: Sequence[Plan], engine: str) -> tuple[int, tuple[tuple[str, str, str], ...]]:
    """The number of operators that the engine runs, and which others it refused."""
    nodes = [node for plan in plans for node in plan.nodes]
    refused = {
        (node.operator, str(refusal.code), refusal.why)
        for node in nodes
        if node.engine != engine
        for refusal in node.refusals
        if refusal.engine == engine
    }
    lost = {
        ("region", str(refusal.code), refusal.why)
        for plan in plans
        for region in plan.regions
        for refusal in region.refusals
        if refusal.code != "not_profitable"
    }
    return sum(node.engine == engine for node in nodes), tuple(sorted(refused | lost))


def _results(call: Call, sample: Sample) -> list[Any]:
    """The call's result on a copy of the arguments, what it left in the buffers, and gradients where `backward`."""
    own = copied(sample.arguments)
    state = sample.subject.state
    if state:
        with torch.no_grad():
            for tensor, saved in zip(state, sample.subject.saved, strict=True):
                tensor.copy_(saved)
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.set_grad_enabled(sample.backward):
            result = call(*own)
        left = [tensor.detach().clone() for tensor in state if not tensor.requires_grad]
        if not sample.backward:
            return [result, left]
        outputs = [t for t in tensors_of(result) if t.requires_grad]
        inputs = [t for t in (*tensors_of(own), *state) if t.requires_grad]
        if not outputs or not inputs:
            return [result, left]
        # Not ones: a sum's gradient hides much.
        generator = torch.Generator().manual_seed(7)
        cotangents = [torch.rand(t.shape, generator=generator, dtype=t.dtype) + 0.5 for t in outputs]
        cotangents = [lazy(t) if t.is_complex() else t for t in cotangents]
        gradients = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        # AOTAutograd returns resolved gradients where eager's have a lazy bit.
        return [result, left, [g if g is None else g.resolve_conj().resolve_neg() for g in gradients]]


def _forms(actual: Any, expected: Any) -> str:
    got, want = tensors_of(actual), tensors_of(expected)
    if len(got) != len(want):
        return f"there are {len(got)} outputs, {len(want)} in eager"
    return next((why for a, b in zip(got, want, strict=True) if (why := form_difference(a, b))), "")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]
