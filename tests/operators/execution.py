"""One call in eager and on an engine, compared.

The engine is forced: estimates that would leave a region to eager are overruled, nothing is verified behind the test's back, and what fails
raises (`strict`). The compiled call runs twice, for the first call goes through the Python executor and the second through the
C++ plan.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.operators.values import copied, difference, form_difference, seed, tensors_of, widened
from torch_hybrid_backend.backend import ENGINES, compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.store import Store

Call = Callable[..., Any]

PASSED, WRONG, ERROR, SKIPPED, UPSTREAM = "passed", "wrong", "error", "skipped", "upstream"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample.

    `status`: "passed"; "wrong" (the result differs from eager's); "error" (the compiled call raised, eager did not); "skipped" (eager itself
    raised, or the sample cannot be compared); "upstream" (torch's own aot_eager backend fails as well). `taken` counts the operators that the
    engine ran, `refused` tells those it did not: (operator, code, sentence).
    """

    status: str
    why: str = ""
    taken: int = 0
    refused: tuple[tuple[str, str, str], ...] = field(default=())


def settings(engine: str, cache_dir: Path, threads: int) -> Config:
    """The engine forced, or the backend as users have it where `engine` is "" (but for timing)."""
    options: dict[str, object] = {"placement": "estimate", "cache_dir": cache_dir, "compile_threads": threads}
    if engine:
        options |= {"engines": engine, "strict": True, "verify": "off", "min_region_nodes": 1}
    return Config().with_options(options, None)


@contextlib.contextmanager
def _forced(config: Config) -> Iterator[None]:
    if not config.engines:
        yield
        return
    with (
        mock.patch("torch_hybrid_backend.partition.placement.eager_us", return_value=math.inf),
        mock.patch("torch_hybrid_backend.backend.ENGINES", (*ENGINES, ("interpreter", _interpreter))),
    ):
        yield


def _interpreter(_config: Config, _store: Store) -> Engine:
    from tests.operators.interpreter_engine import InterpreterEngine

    return InterpreterEngine()


@dataclass(frozen=True, slots=True)
class Subject:
    """What is called. `state`: parameters and buffers of a module, which every call finds as they were made and whose gradients or
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


def compare(
    subject: Subject, arguments: Any, config: Config, *, backward: bool = False, is_random: bool = False
) -> Outcome:
    """Call the subject in eager and compiled. `is_random`: only the form of the results counts."""
    plans: list[Plan] = []
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    try:
        expected = _results(subject.call, subject, arguments, backward)
    except Exception as error:  # the sample is meant to fail, or needs what is not here
        return Outcome(SKIPPED, _sentence(error))
    if not tensors_of(expected):
        return Outcome(SKIPPED, "no tensor comes out")

    def exact() -> Any:
        try:
            wide = subject.wide()
            return _results(wide.call, wide, widened(arguments), backward)
        except Exception:  # not every operator takes float64
            return None

    def differs(actual: Any) -> str:
        return _forms(actual, expected) if is_random else difference(actual, expected, exact)

    status, why = PASSED, ""
    try:
        with _forced(config):
            for actual in _twice(subject, arguments, backend, backward):
                why = why or differs(actual)
        status = WRONG if why else PASSED
    except Exception as error:
        status, why = ERROR, _sentence(error)
    if status in (WRONG, ERROR) and _fails_upstream(subject, arguments, backward, differs):
        status = UPSTREAM
    return Outcome(status, why, *_share(plans, config.engines[0] if config.engines else "tvm"))


def _share(plans: Sequence[Plan], engine: str) -> tuple[int, tuple[tuple[str, str, str], ...]]:
    """How many operators the engine runs, and which others it refused."""
    nodes = [node for plan in plans for node in plan.nodes]
    refused = {
        (node.operator, str(refusal.code), refusal.why)
        for node in nodes
        if node.engine != engine
        for refusal in node.refusals
        if refusal.engine == engine
    }
    return sum(node.engine == engine for node in nodes), tuple(sorted(refused))


def _results(call: Call, subject: Subject, arguments: Any, backward: bool) -> list[Any]:
    """The call's result on a copy of the arguments, what it left in the buffers, and gradients where `backward`."""
    own = copied(arguments)
    with torch.no_grad():
        for tensor, saved in zip(subject.state, subject.saved, strict=True):
            tensor.copy_(saved)
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.set_grad_enabled(backward):
            result = call(*own)
        left = [tensor.detach().clone() for tensor in subject.state if not tensor.requires_grad]
        if not backward:
            return [result, left]
        outputs = [t for t in tensors_of(result) if t.requires_grad and t.dtype.is_floating_point]
        inputs = [t for t in (*tensors_of(own), *subject.state) if t.requires_grad]
        if not outputs or not inputs:
            return [result, left]
        # Not ones: a sum's gradient hides much.
        generator = torch.Generator().manual_seed(7)
        cotangents = [torch.rand(t.shape, generator=generator, dtype=t.dtype) + 0.5 for t in outputs]
        return [result, left, torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)]


def _twice(subject: Subject, arguments: Any, backend: Any, backward: bool) -> Iterator[Any]:
    torch._dynamo.reset()
    compiled = torch.compile(subject.call, backend=backend, dynamic=False)
    for _ in range(2):
        yield _results(compiled, subject, arguments, backward)


def _fails_upstream(subject: Subject, arguments: Any, backward: bool, differs: Callable[[Any], str]) -> bool:
    try:
        return bool(differs(next(_twice(subject, arguments, "aot_eager", backward))))
    except Exception:
        return True


def _forms(actual: Any, expected: Any) -> str:
    got, want = tensors_of(actual), tensors_of(expected)
    if len(got) != len(want):
        return f"there are {len(got)} outputs, {len(want)} in eager"
    return next((why for a, b in zip(got, want, strict=True) if (why := form_difference(a, b))), "")


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]
