"""A case, tried: compiled with the backend and compared with eager and float64; timed beside eager where that is asked for."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters, same

from tests.ecosystem.case import Case, in_double
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.measuring.measure import measure

_SEEDS = (1, 2, 3)  # the call that chooses engines, that of the plan, one more: sizes may vary from the second one on
_TOLERANCE = 1e-4


@dataclass(slots=True)
class Outcome:
    """The outcome of a case. `wrong`: how results differ from eager's, or "". `faults`: the backend's warnings.

    graphs: compiled by the backend, backward ones included. breaks: Dynamo's reasons for cutting the model, and how often.
    operators, in_regions: of all graphs, and how many of them an engine runs; flops_share of the floating-point operations, 0 to 1.
    refused: operators that run in eager, by "operator: code"; lost: the same of whole regions, by code.
    compile_s: what the first calls took beyond steady ones. eager_ms, hybrid_ms: medians of one call, in interleaved rounds, if timed.
    """

    name: str
    wrong: str = ""
    max_error: float = 0.0
    faults: list[str] = field(default_factory=list)
    parameters: int = 0
    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    operators: int = 0
    in_regions: int = 0
    flops_share: float | None = None
    refused: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    compile_s: float = 0.0
    eager_ms: float | None = None
    hybrid_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """The message that has a worker (`torch_hybrid_backend.bench.worker`) try a case. `seconds`: time to spend on timing, 0 for none."""

    name: str
    threads: int
    seconds: float

    def answer(self, _state: object) -> dict[str, Any]:
        """The outcome as a dictionary. Raises what the model raises."""
        from tests.ecosystem.catalogue import find

        torch.set_num_threads(self.threads)
        return asdict(attempt(find(self.name), self.seconds))


def attempt(case: Case, seconds: float = 0.0) -> Outcome:
    """Run the case under the settings of the environment. Raises what the model raises, in eager or compiled.

    Raises ValueError where the case itself is worth nothing: its outputs vanish or are not finite.
    """
    outcome = Outcome(case.name)
    plans: list[Plan] = []
    backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
    counters.clear()
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo), _warnings() as outcome.faults:
        model = case.build()
        outcome.parameters = sum(parameter.numel() for parameter in model.parameters())
        eager = case.function(model, lambda part: part)
        hybrid = case.function(case.build(), functools.partial(torch.compile, backend=backend))
        spent = 0.0
        for seed in _SEEDS:
            expected = [value.clone() for value in eager(case.inputs(seed))]
            _demand_sense(case, expected)
            inputs = case.inputs(seed)
            start = time.perf_counter()
            result = hybrid(inputs)
            spent += time.perf_counter() - start
            why, error = _difference(case, seed, expected, result)
            outcome.wrong = outcome.wrong or why
            outcome.max_error = max(outcome.max_error, error)
        if seconds:
            inputs = case.inputs(_SEEDS[-1])
            calls = (functools.partial(eager, inputs), functools.partial(hybrid, inputs))
            timings = measure(calls, seconds, min_rounds=5)
            outcome.eager_ms, outcome.hybrid_ms = (round(timing.median_us / 1e3, 4) for timing in timings)
            spent -= len(_SEEDS) * timings[1].median_us / 1e6
        outcome.compile_s = round(spent, 2)
    outcome.breaks = {reason.strip().splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    _account(outcome, plans)
    return outcome


def _demand_sense(case: Case, expected: list[torch.Tensor]) -> None:
    floats = [value for value in expected if value.is_floating_point()]
    if not expected or not all(value.isfinite().any() for value in floats):
        raise ValueError(f"{case.name} returns nothing to compare: mend its weights or inputs")
    if floats and max((value.abs().max().item() for value in floats if value.numel()), default=0.0) < 1e-2:
        raise ValueError(
            f"{case.name} returns next to nothing, in which an error of 1e-4 would not show: mend its weights"
        )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what the backend warns of."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("torch_hybrid_backend")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _difference(case: Case, seed: int, expected: list[torch.Tensor], result: list[torch.Tensor]) -> tuple[str, float]:
    """The fault of the result, or "", and its largest absolute difference from eager's.

    The judge is `torch._dynamo.utils.same`, as for the zoo. Whole numbers (tokens, classes) are eager's or, where eager is undecided, those of
    the run in float64.
    """
    forms = [[(tuple(value.shape), value.dtype) for value in values] for values in (expected, result)]
    if forms[0] != forms[1]:
        return f"seed {seed}: shapes and dtypes are {forms[1]}, eager's {forms[0]}"[:500], float("nan")

    @functools.cache
    def exact() -> list[torch.Tensor] | list[None]:
        try:
            return case.function(case.build().double(), lambda part: part)(in_double(case.inputs(seed)))
        except RuntimeError:  # an operator does not take float64 (grouped matrix products): the tolerance decides
            return [None] * len(expected)

    worst = 0.0
    for position, (reference, value) in enumerate(zip(expected, result, strict=True)):
        if reference.numel() == 0:
            continue
        error = (reference.double() - value.double()).abs().nan_to_num().max().item()
        worst = max(worst, error)
        if reference.is_floating_point():
            right = torch.allclose(reference, value, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        else:
            right = torch.equal(reference, value)
        if not right and not _near(reference, value, exact()[position]):
            return f"seed {seed}: output {position}, {tuple(reference.shape)}, up to {error:.2g} from eager's", worst
    return "", worst


def _near(reference: torch.Tensor, value: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """True if the run in float64 says that the value is as good as eager's."""
    if exact is None or exact.shape != value.shape:
        return False
    if not value.is_floating_point():
        return torch.equal(exact, value)
    return bool(same(reference, value, exact, tol=_TOLERANCE, equal_nan=True))


def _account(outcome: Outcome, plans: list[Plan]) -> None:
    nodes = [node for plan in plans for node in plan.nodes]
    inside = [node for node in nodes if node.engine != "eager"]
    flops = sum(node.flops for node in nodes)
    outcome.graphs, outcome.operators, outcome.in_regions = len(plans), len(nodes), len(inside)
    outcome.flops_share = round(sum(node.flops for node in inside) / flops, 4) if flops else None
    refusals = [f"{node.operator}: {refusal.code}" for node in nodes for refusal in node.refusals]
    outcome.refused = dict(Counter(refusals).most_common())
    lost = [refusal.code for plan in plans for region in plan.regions for refusal in region.refusals]
    outcome.lost = dict(Counter(map(str, lost)).most_common())
