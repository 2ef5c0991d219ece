"""Placement of a region on an engine: verify the candidates, price them, take the cheapest.

In the first call each compiled candidate runs on the real inputs, and its outputs are compared with eager's. Candidates that fail are
demoted (`fallback`). The others and eager are priced: by timing them against each other, by timings that an earlier process
left in the cache, or by a roofline estimate. Eager is a candidate like any other. Of equally cheap candidates the first in
order wins; so does the first in order if no estimate exists. A winner may serve only some sizes: then the cheapest candidate that serves all
sizes runs the others (`ranged_region`).

Eager may be unable to run the region although the inputs are right: memory is short, or an operator has no kernel for its inputs' form. Then an
engine that can runs the region unchecked. An error that leaves a device unusable is raised, for no candidate can run on that device any more.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import EAGER, CompiledRegion, PendingRegion
from torch_hybrid_backend.core.limits import MAX_HELD_BYTES
from torch_hybrid_backend.core.plan import Attempt, Cost, Refusal, RegionDecision, attempts_in_words
from torch_hybrid_backend.core.program import OperatorCall
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import failures, is_sticky
from torch_hybrid_backend.generators import Replay
from torch_hybrid_backend.graph.precision import computes, precision_of
from torch_hybrid_backend.measuring.measure import HostTimer, Rounds, Timer, measure
from torch_hybrid_backend.measuring.other_load import MARGIN, OtherLoad
from torch_hybrid_backend.measuring.timing_cache import KeptTimes, TimingCache
from torch_hybrid_backend.partition.accuracy import Comparison, compare
from torch_hybrid_backend.partition.estimate import eager_us, engine_us, roofline
from torch_hybrid_backend.partition.fallback import compile_refusal, demote, report_unchecked, run_refusal
from torch_hybrid_backend.partition.flops import node_flops
from torch_hybrid_backend.partition.ranged_region import RangedRegion, unserved
from torch_hybrid_backend.partition.reference import reference, replay_of, run_eager, unable_to_run
from torch_hybrid_backend.partition.wrapped_region import reported

_log = logging.getLogger(__name__)

TIMINGS = "placements"  # the kind of placement timings in the timing cache

# A candidate has lost if its best round takes this many times as long as another candidate's worst round. Further rounds are not run.
_CLEAR_RATIO = 1.3
# An engine this many times as slow as eager was probably disturbed by other load that the system did not report (`other_load`). The engine
# loses now, and the next process times it again.
_IMPLAUSIBLE_RATIO = 10.0

# Of the three largest intermediate values of a region: most others take their places in its arena.
_LARGE_BYTES = 4 * MAX_HELD_BYTES

# Runs a region on its inputs, in order, and returns its outputs, in order.
Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that runs a region.

    `compiled`: None if eager runs the region. `outputs`: the region's outputs in the call in which the choice was made. `pending`: regions that
    engines are building anew in a more accurate way, because their results differed too much from eager's.
    """

    decision: RegionDecision
    compiled: CompiledRegion | None = field(default=None, compare=False)
    outputs: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    pending: tuple[PendingRegion, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Pricing:
    """Everything that pricing needs besides the region.

    `timings`: the timing cache; None if timings are not kept. `versions`: engine name -> key of all that its timings on `device` depend on; an
    engine without an entry is priced anew in each process. `deadline`: the graph's deadline, for compiling while candidates are tried.
    `timer`: times work on `device`.
    """

    timings: TimingCache | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Device = CPU
    deadline: Deadline = field(default_factory=lambda: Deadline(math.inf))
    timer: Timer = field(default_factory=HostTimer)


@dataclass(frozen=True, slots=True)
class _EagerLast:
    """Timer of engines, then of eager: what engines hold (arenas, packed constants) is freed before eager runs.

    A round calls each twice, unless that takes more than the budget, and tells the shorter time: after it engines make again what was freed."""

    timer: Timer
    engines: Mapping[str, CompiledRegion]
    budget_s: float

    def now(self) -> int:
        return self.timer.now()

    def round(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        taken, eager = self._shorter(calls[: len(self.engines)]), calls[len(self.engines) :]
        if not eager:  # it cannot run the region
            return taken
        for engine in self.engines.values():
            engine.release()
        return taken + self._shorter(eager)

    def _shorter(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        once = self.timer.round(calls)
        return once if sum(once) > 1e9 * self.budget_s else list(map(min, once, self.timer.round(calls)))


class _CandidateError(Exception):
    """A candidate raised while it was timed."""

    def __init__(self, engine: str, error: Exception) -> None:
        super().__init__(engine)
        self.engine = engine
        self.error = error


def choose(
    region: Region,
    candidates: Mapping[str, CompiledRegion | PendingRegion | Refused | Exception],
    inputs: Sequence[torch.Tensor],
    config: Config,
    pricing: Pricing,
) -> Choice:
    """Choose the engine of `region` and run the region once on `inputs`.

    `candidates`: engine name -> what `Engine.compile` returned, or why the engine does not accept the region, in order of preference; eager
    is implied. A candidate that is still being built does not take part.

    Raises RegionError under `config.strict` if a candidate fails. An error that leaves a device unusable is raised unchanged. So is an error
    of eager's: always if the input values caused it, otherwise if no engine can run the region either.
    """
    refusals: list[Refusal] = []

    def drop(engine: str, refused: Refused, cause: Exception | None = None) -> None:
        alive.pop(engine, None)
        refusals.append(demote(region, engine, refused, strict=config.strict, cause=cause))

    replay = replay_of(region)
    alive: dict[str, CompiledRegion] = {}
    for engine, candidate in candidates.items():
        if isinstance(candidate, Exception):
            drop(engine, compile_refusal(candidate), candidate)
        elif isinstance(entry := _entry(engine, candidate, inputs), Refusal):
            refusals.append(entry)
        else:
            alive[engine] = entry

    trials = _try_all(region, alive, inputs, config, pricing.deadline, replay, drop)
    replay, unable = trials.replay, trials.unable
    if unable is not None:
        refusals.append(Refusal.of(EAGER, unable))
    if alive and not region.draws and sum(t.nbytes for made in trials.results.values() for t in made) > MAX_HELD_BYTES:
        trials.results.clear()  # each candidate computes its outputs again while it is timed, and the winner runs once more
    if region.device.is_host and any(map(_is_large, alive.values())):  # a device's timer waits for whole rounds
        pricing = replace(pricing, timer=_EagerLast(pricing.timer, alive, config.measure_budget_s))
    costs = _price(region, alive, inputs, config, pricing, drop, eager_runs=unable is None)
    contenders = [cost for cost in costs if cost.engine != EAGER] if config.prefer_kernels and alive else costs
    # Without costs all candidates are equal: none is left, or there is no estimate for the device.
    winner = cheapest(contenders).engine if contenders else next(iter(alive), EAGER)
    refusals += [_building_refusal(*each) for each in trials.pending.items()]
    refusals += [_lost_refusal(region, engine, winner, costs) for engine in alive if engine != winner]
    compiled_winner = _at_every_size(region, alive, winner, costs)
    if unable is not None and compiled_winner is not None:
        report_unchecked(region, winner, unable)
    decision = decide(
        region, winner, compiled_winner, costs, tuple(refusals), *_accuracy_of(trials.compared.get(winner))
    )
    # The winner's outputs, so that later calls return the same bits: engines agree with eager only within tolerances. Random outputs differ in
    # every call, so eager's may be returned.
    outputs = trials.results.get(EAGER if region.draws and EAGER in trials.results else winner)
    if outputs is None:
        outputs = replay.run(lambda: run_eager(region, inputs) if compiled_winner is None else compiled_winner(inputs))
    replay.finish()
    return Choice(decision, compiled_winner, outputs, tuple(trials.pending.values()))


@dataclass(frozen=True, slots=True)
class _Trials:
    """Results of trying the candidates.

    `results`, `compared`, `pending`: outputs, comparisons with eager, and regions that are being built, by engine. `unable`: the reason why
    eager cannot run the region; None if it can. `replay`: rewinds the random number generator between runs.
    """

    results: dict[str, list[torch.Tensor]]
    compared: Mapping[str, Comparison | None]
    pending: Mapping[str, PendingRegion]
    unable: Refused | None
    replay: Replay


def _try_all(
    region: Region,
    alive: dict[str, CompiledRegion],
    inputs: Sequence[torch.Tensor],
    config: Config,
    deadline: Deadline,
    replay: Replay,
    drop: Callable[..., None],
) -> _Trials:
    """Run every candidate once. Refined candidates replace themselves in `alive`; candidates that fail or differ from eager are dropped."""
    expected_or_refused = replay.run(lambda: reference(region, inputs)) if alive and config.verify != "off" else None
    unable = expected_or_refused if isinstance(expected_or_refused, Refused) else None  # why eager is no candidate
    if unable is not None:
        replay.rewind()  # eager may have drawn numbers before it failed
        replay = replay_of(region)
    expected = None if isinstance(expected_or_refused, Refused) else expected_or_refused
    results: dict[str, list[torch.Tensor]] = {}
    compared: dict[str, Comparison | None] = {}
    pending: dict[str, PendingRegion] = {}
    for engine in list(alive):
        try:
            tried, results[engine], comparison = _try(region, alive[engine], inputs, config, expected, deadline, replay)
        except failures(Exception) as error:  # an engine's kernels or code may fail in any way; eager is there for it
            if expected_or_refused is None and EAGER not in results and not is_sticky(error):
                results.update(_eager_outputs(region, inputs, replay))
            drop(engine, run_refusal(error), error)
            continue
        if isinstance(tried, PendingRegion):
            pending[engine] = tried
            del alive[engine]
            continue
        alive[engine] = tried
        compared[engine] = comparison
        if comparison is not None and comparison.refused is not None:
            drop(engine, _after_attempts(tried.attempts, comparison.refused))

    results = {engine: made for engine, made in results.items() if engine in alive or engine == EAGER}
    if (region.draws or not alive) and expected is not None:
        results[EAGER] = expected
    # Eager's outputs are not kept: memory may be short while calls are timed.
    return _Trials(results, compared, pending, unable, replay)


def _eager_outputs(region: Region, inputs: Sequence[torch.Tensor], replay: Replay) -> dict[str, list[torch.Tensor]]:
    """Eager's outputs under eager's name; empty if eager cannot run the region. Raises PyTorch's error if the inputs are at fault."""
    outputs = replay.run(lambda: reference(region, inputs))
    return {} if isinstance(outputs, Refused) else {EAGER: outputs}


def _entry(
    engine: str, candidate: CompiledRegion | PendingRegion | Refused, inputs: Sequence[torch.Tensor]
) -> CompiledRegion | Refusal:
    """The candidate, if it is to be tried; otherwise a refusal. Such a refusal is no failure, and no warning is logged."""
    if isinstance(candidate, Refused):
        return Refusal.of(engine, candidate)
    if isinstance(candidate, PendingRegion):
        return _building_refusal(engine, candidate)
    outside = unserved(candidate, inputs)
    return Refusal(engine, Reason.SYMBOLIC_SHAPE, f"this call has {outside}") if outside else candidate


def _at_every_size(
    region: Region, alive: Mapping[str, CompiledRegion], winner: str, costs: Sequence[Cost]
) -> CompiledRegion | None:
    """The winner's compiled region, None for eager. If the region serves only some sizes, the cheapest candidate that serves all is added."""
    if winner not in alive or not _ranges(alive[winner]):
        return alive.get(winner)
    able = [name for name, made in alive.items() if not _ranges(made)]
    known = [cost for cost in costs if cost.engine in (*able, EAGER)]
    other = cheapest(known).engine if known else next(iter(able), EAGER)
    otherwise = alive.get(other)
    if otherwise is not None and otherwise.program is None:
        otherwise = reported(otherwise)  # plans call it from Python: errors of the engine must be told from the user's
    return RangedRegion(region, alive[winner], other, otherwise)


def _ranges(compiled: CompiledRegion) -> bool:
    return compiled.program is not None and bool(compiled.program.ranges)


def _is_large(compiled: CompiledRegion) -> bool:
    """True if the region's arena is so large that eager's own intermediate values should not come on top of it."""
    program = compiled.program
    if program is None:
        return False
    others = {*program.inputs, *program.outputs, *(constant.buffer for constant in program.constants)}
    own = (spec for position, spec in enumerate(program.buffers) if position not in others and spec.is_static)
    return sum(sorted(spec.size_bytes for spec in own)[-3:]) > _LARGE_BYTES


def _building_refusal(engine: str, pending: PendingRegion) -> Refusal:
    how = f" with {attempts_in_words(pending.attempts)}" if pending.attempts else ""
    return Refusal(engine, Reason.BUILDING, f"it is being built{how}; until then another engine runs the region")


def _accuracy_of(comparison: Comparison | None) -> tuple[float | None, str]:
    """The largest error of a region's results, and a note on how they were compared with eager's."""
    return (None, "") if comparison is None else (comparison.max_error, comparison.note)


def _after_attempts(attempts: Sequence[Attempt], refused: Refused) -> Refused:
    """The refusal of a region that was computed in several ways, each of which differs too much from eager."""
    if not attempts:
        return refused
    return Refused(refused.code, f"{refused.why}, with {attempts_in_words(attempts)}")


def decide(
    region: Region,
    engine: str,
    compiled: CompiledRegion | None,
    costs: tuple[Cost, ...] = (),
    refusals: tuple[Refusal, ...] = (),
    max_error: float | None = None,
    accuracy_note: str = "",
) -> RegionDecision:
    """The plan's entry for a region that `engine` runs. `accuracy_note`: how its results were compared with eager's."""
    attempts = compiled.attempts if compiled is not None else ()
    steps = compiled.program.steps if compiled is not None and compiled.program is not None else ()
    precisions = Counter(precision_of(node) for node in region.graph_module.graph.nodes if computes(node))
    return RegionDecision(
        name=region.name,
        engine=engine,
        key=region.key,
        node_names=region.node_names,
        inputs=tuple(spec.spec for spec in region.inputs if spec.spec is not None),
        outputs=tuple(spec for spec in region.outputs if isinstance(spec, TensorSpec)),
        costs=costs,
        refusals=refusals,
        max_error=max_error,
        flops=sum(map(node_flops, region.graph_module.graph.nodes)),
        kernels=tuple(step.label for step in steps),
        source=region.source,
        device=region.device,
        operators=tuple(f"{call.name}: {call.title}" for call in steps if isinstance(call, OperatorCall)),
        precision=tuple(name for name, _ in precisions.most_common()),
        attempts=attempts,
        note="; ".join(filter(None, [accuracy_note, compiled.note if compiled is not None else ""])),
    )


def _try(
    region: Region,
    compiled: CompiledRegion,
    inputs: Sequence[torch.Tensor],
    config: Config,
    expected: Sequence[torch.Tensor] | None,
    deadline: Deadline,
    replay: Replay,
) -> tuple[CompiledRegion | PendingRegion, list[torch.Tensor], Comparison | None]:
    """Refine a candidate and run it once. Returns the refined candidate, its outputs, and their comparison with `expected`, if given.

    If the outputs differ too much, the candidate is made more accurate, step by step (`CompiledRegion.exact`). If a step has to be built first,
    the pending region is returned as the candidate.
    """

    def run(candidate: CompiledRegion) -> list[torch.Tensor]:
        return replay.run(lambda: list(candidate(inputs)))

    with torch.no_grad():
        if config.placement != "estimate":
            compiled = compiled.refine(inputs, config.measure_budget_s, deadline)
        results = run(compiled)
        if expected is None:
            return compiled, results, None
        comparison = compare(region, inputs, expected, results, replay)
        while comparison.relative_error is not None:
            exact = compiled.exact(deadline, comparison.relative_error)
            if exact is None or exact is compiled:
                break
            _log.info("region %s is to be computed more accurately: %s", region.name, comparison.why)
            if isinstance(exact, PendingRegion):
                return exact, results, comparison
            del results
            compiled, results = exact, run(exact)
            comparison = compare(region, inputs, expected, results, replay)
    return compiled, results, comparison


def _lost_refusal(region: Region, engine: str, winner: str, costs: Sequence[Cost]) -> Refusal:
    spent = {cost.engine: cost.microseconds for cost in costs}
    if engine in spent:
        why = f"it takes {time_in_words(spent[engine])}, {winner} {time_in_words(spent[winner])}"
    else:
        why = f"{winner} comes before it, and there is no estimate of costs on {region.device}"
    _log.info("region %s goes to %s, not %s: %s", region.name, winner, engine, why)
    return Refusal(engine, Reason.NOT_PROFITABLE, why)


def _price(
    region: Region,
    alive: Mapping[str, CompiledRegion],
    inputs: Sequence[torch.Tensor],
    config: Config,
    pricing: Pricing,
    drop: Callable[[str, Refused, Exception], None],
    *,
    eager_runs: bool,
) -> tuple[Cost, ...]:
    """Costs of the candidates in `alive`, and last of eager, if eager runs. A candidate that raises while it is timed is dropped.

    Empty if costs are to be estimated and the device has no roofline.
    """
    while alive:
        if config.placement == "estimate":
            on = roofline(region.device)
            if on is None:
                return ()
            estimated = [Cost(engine, engine_us(region, c, on), "estimated") for engine, c in alive.items()]
            return (*estimated, Cost(EAGER, eager_us(region, on), "estimated")) if eager_runs else tuple(estimated)
        contenders = {engine: _version(pricing.versions.get(engine, ""), c) for engine, c in alive.items()}
        runners: dict[str, Runner] = dict(alive)
        if eager_runs:
            contenders[EAGER] = torch.__version__
            runners[EAGER] = region.eager.run
        calls = {engine: functools.partial(_guarded, engine, run, inputs) for engine, run in runners.items()}
        try:
            rounds = Rounds(clear_ratio=_CLEAR_RATIO, **_warm(config))
            if isinstance(pricing.timer, _EagerLast):
                rounds["min_rounds"] = 1
            return priced(region.key, contenders, calls, config.measure_budget_s, pricing, rounds)
        except _CandidateError as failed:
            if failed.engine == EAGER:
                unable_to_run(failed.error)
                eager_runs = False
                continue
            drop(failed.engine, run_refusal(failed.error), failed.error)
    return ()


def priced(
    key: str,
    contenders: Mapping[str, str],
    calls: Mapping[str, Callable[[], object]],
    budget_s: float,
    pricing: Pricing,
    rounds: Rounds,
) -> tuple[Cost, ...]:
    """Costs of `calls`, one for each of the contenders (name -> version) and in their order.

    Costs are looked up under `key`, or the calls are timed against each other. Timings are kept only if eager is among the contenders: eager's
    time shows whether they are plausible. An exception of a call passes through.
    """
    timings = pricing.timings if EAGER in contenders and all(contenders.values()) else None
    key = timing_key(key, contenders)
    known = timings.get(TIMINGS, key, pricing.device) if timings is not None else KeptTimes()
    if known.keys() == contenders.keys() and max(known.values()) < math.inf:
        kind = "disturbed" if known.is_disturbed else "cached"
        return tuple(Cost(name, known[name], kind) for name in contenders)
    how = Rounds(until_decided=True, timer=pricing.timer, **rounds)
    load = OtherLoad()
    timings_by_contender = measure([calls[name] for name in contenders], budget_s, **how)
    is_disturbed = load.is_felt()
    measured = {name: timing.low_us for name, timing in zip(contenders, timings_by_contender, strict=True)}
    if timings is not None and max(measured.values()) < _IMPLAUSIBLE_RATIO * measured[EAGER]:
        timings.put(TIMINGS, key, pricing.device, measured, is_disturbed=is_disturbed)
    return tuple(Cost(name, cost, "disturbed" if is_disturbed else "measured") for name, cost in measured.items())


def cheapest(costs: Sequence[Cost]) -> Cost:
    """The least cost. If other load disturbed the timings, the first cost in order within `MARGIN` of the least: smaller differences are
    noise."""
    least = min(costs, key=lambda cost: cost.microseconds)
    margin = MARGIN if any(cost.kind == "disturbed" for cost in costs) else 1.0
    return next(cost for cost in costs if cost.microseconds <= margin * least.microseconds)


def _version(version: str, compiled: CompiledRegion) -> str:
    """Key of all that a candidate's times depend on: its engine's version, its form, and its way of computing the region, if not the first way.
    "" if times are not kept."""
    parts = [version, compiled.form, *(each.how for each in compiled.attempts[-1:])]
    return " ".join(filter(None, parts)) if version else ""


def timing_key(key: str, contenders: Mapping[str, str]) -> str:
    """Key of the times of contenders (name -> version) for the work `key`."""
    return json.dumps([key, sorted(contenders.items())])


def _warm(config: Config) -> Rounds:
    """Rounds for candidates that have run on these inputs when they were compared: no warm-up round, and two rounds may be enough."""
    return Rounds() if config.verify == "off" else Rounds(warmup_rounds=0, min_rounds=2)


def _guarded(engine: str, run: Runner, inputs: Sequence[torch.Tensor]) -> None:
    try:
        with torch.no_grad():
            run(inputs)
    except failures(Exception) as error:  # `_price` drops the engine that raised
        raise _CandidateError(engine, error) from error
