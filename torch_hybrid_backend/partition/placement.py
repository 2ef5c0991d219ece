"""Placement of a region on an engine: verify the candidates, price them, take the cheapest.

On the first call each compiled candidate runs on the real inputs and is compared with eager. Those that fail are
demoted (`fallback`). The others and eager are priced: by timing them against each other, by timings an earlier process
left in the cache, or by a roofline estimate. Eager is a candidate like any other; of equally cheap ones the first in
order wins, as it does where there is nothing to estimate by. Where the winner serves only some sizes, the cheapest of those that serve all
runs the others (`ranged_region`). Where eager cannot run the region although nothing is wrong
with the values (it needs more memory than there is, or an operator does not take its inputs' form), an engine that can
runs it unchecked. What leaves a device unusable raises: nobody can run there any more.
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
from torch_hybrid_backend.measure import HostTimer, Rounds, Timer, measure
from torch_hybrid_backend.other_load import MARGIN, OtherLoad
from torch_hybrid_backend.partition.accuracy import Comparison, compare
from torch_hybrid_backend.partition.estimate import eager_us, engine_us, roofline
from torch_hybrid_backend.partition.fallback import compile_refusal, demote, report_unchecked, run_refusal
from torch_hybrid_backend.partition.flops import node_flops
from torch_hybrid_backend.partition.ranged_region import RangedRegion, unserved
from torch_hybrid_backend.partition.reference import reference, replay_of, run_eager, unable_to_run
from torch_hybrid_backend.partition.wrapped_region import reported
from torch_hybrid_backend.timing_cache import KeptTimes, TimingCache

_log = logging.getLogger(__name__)

TIMINGS = "placements"  # their kind in the cache of timings

# A candidate that takes so many times as long in its best round as another in its worst has lost, whatever further rounds say.
_CLEAR_RATIO = 1.3
# An engine so many times as slow as eager tells more of the machine's load than of its kernels, where the system does not tell of it
# (`other_load`): it loses now, and is timed again by the next process.
_IMPLAUSIBLE_RATIO = 10.0

# Of the three largest intermediate values of a region: most others take their places in its arena.
_LARGE_BYTES = 4 * MAX_HELD_BYTES

# Runs a region on its inputs, in order, and returns its outputs, in order.
Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that runs a region. `compiled` is None where eager does; `outputs` are those of the call the choice was made
    in. `pending`: what engines whose results were too far off are building in a more accurate way."""

    decision: RegionDecision
    compiled: CompiledRegion | None = field(compare=False)
    outputs: list[torch.Tensor] = field(compare=False, repr=False)
    pending: tuple[PendingRegion, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Pricing:
    """Everything that pricing needs besides the region.

    `timings`: None where none are kept. `versions`: engine name -> what its timings on `device` depend on; an engine left out is priced anew
    in each process. `deadline`: the graph's, for what candidates compile while they are tried. `timer`: of work on `device`.
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
    """Choose the engine of `region` and run it once on `inputs`.

    `candidates`: engine name -> what `Engine.compile` returned, or why the engine does not accept the region, in order of preference; eager
    is implied. One that is still being built does not take part. Raises RegionError under `config.strict` where a candidate fails, and
    whatever leaves a device unusable as it is. What eager raises for the values passes through; for other reasons where no engine can run the
    region either.
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

    trials = _tried_all(region, alive, inputs, config, pricing.deadline, replay, drop)
    replay, unable = trials.replay, trials.unable
    if unable is not None:
        refusals.append(Refusal.of(EAGER, unable))
    if alive and not region.draws and sum(t.nbytes for made in trials.results.values() for t in made) > MAX_HELD_BYTES:
        trials.results.clear()  # each candidate makes its own while it is timed, and the winner runs once more
    if region.device.is_host and any(map(_is_large, alive.values())):  # a device's timer waits for whole rounds
        pricing = replace(pricing, timer=_EagerLast(pricing.timer, alive, config.measure_budget_s))
    costs = _price(region, alive, inputs, config, pricing, drop, eager_runs=unable is None)
    # Without costs all are equal: nobody is left, or the device is one for which nothing is estimated.
    winner = cheapest(costs).engine if costs else next(iter(alive), EAGER)
    refusals += [_building(*each) for each in trials.pending.items()]
    refusals += [_lost(region, engine, winner, costs) for engine in alive if engine != winner]
    compiled_winner = _at_every_size(region, alive, winner, costs)
    if unable is not None and compiled_winner is not None:
        report_unchecked(region, winner, unable)
    decision = decide(region, winner, compiled_winner, costs, tuple(refusals), *_judgement(trials.compared.get(winner)))
    # What later calls return, to the bit: an engine's are only about eager's. Of random numbers no later call returns the same.
    outputs = trials.results.get(EAGER if region.draws and EAGER in trials.results else winner)
    if outputs is None:
        outputs = replay.run(lambda: run_eager(region, inputs) if compiled_winner is None else compiled_winner(inputs))
    replay.finish()
    return Choice(decision, compiled_winner, outputs, tuple(trials.pending.values()))


@dataclass(frozen=True, slots=True)
class _Trials:
    """Results of trying the candidates: outputs and comparisons by engine, those that are being built, why eager cannot run the region (None
    if it can), and what winds back random numbers."""

    results: dict[str, list[torch.Tensor]]
    compared: Mapping[str, Comparison | None]
    pending: Mapping[str, PendingRegion]
    unable: Refused | None
    replay: Replay


def _tried_all(
    region: Region,
    alive: dict[str, CompiledRegion],
    inputs: Sequence[torch.Tensor],
    config: Config,
    deadline: Deadline,
    replay: Replay,
    drop: Callable[..., None],
) -> _Trials:
    """Run every candidate once. Those that are refined replace themselves in `alive`; those that fail or differ from eager are dropped."""
    found = replay.run(lambda: reference(region, inputs)) if alive and config.verify != "off" else None
    unable = found if isinstance(found, Refused) else None  # why eager is no candidate
    if unable is not None:
        replay.rewind()  # what it drew before it failed
        replay = replay_of(region)
    expected = None if isinstance(found, Refused) else found
    results: dict[str, list[torch.Tensor]] = {}
    compared: dict[str, Comparison | None] = {}
    pending: dict[str, PendingRegion] = {}
    for engine in list(alive):
        try:
            tried, results[engine], comparison = _tried(
                region, alive[engine], inputs, config, expected, deadline, replay
            )
        except failures(Exception) as error:  # an engine's kernels or code may fail in any way; eager is there for it
            if found is None and EAGER not in results and not is_sticky(error):
                results.update(_asked(region, inputs, replay))
            drop(engine, run_refusal(error), error)
            continue
        if isinstance(tried, PendingRegion):
            pending[engine] = tried
            del alive[engine]
            continue
        alive[engine] = tried
        compared[engine] = comparison
        if comparison is not None and comparison.refused is not None:
            drop(engine, _after(tried.attempts, comparison.refused))

    results = {engine: made for engine, made in results.items() if engine in alive or engine == EAGER}
    if (region.draws or not alive) and expected is not None:
        results[EAGER] = expected
    # Without eager's outputs, which need not be there while calls are timed: memory may be short.
    return _Trials(results, compared, pending, unable, replay)


def _asked(region: Region, inputs: Sequence[torch.Tensor], replay: Replay) -> dict[str, list[torch.Tensor]]:
    """Eager's outputs, by its name, if it can run the region. Raises what PyTorch does where the inputs are at fault."""
    found = replay.run(lambda: reference(region, inputs))
    return {} if isinstance(found, Refused) else {EAGER: found}


def _entry(
    engine: str, candidate: CompiledRegion | PendingRegion | Refused, inputs: Sequence[torch.Tensor]
) -> CompiledRegion | Refusal:
    """A candidate that is to be tried; or why it is not, which is no failure: nobody need be warned of it."""
    if isinstance(candidate, Refused):
        return Refusal.of(engine, candidate)
    if isinstance(candidate, PendingRegion):
        return _building(engine, candidate)
    outside = unserved(candidate, inputs)
    return Refusal(engine, Reason.SYMBOLIC_SHAPE, f"this call has {outside}") if outside else candidate


def _at_every_size(
    region: Region, alive: Mapping[str, CompiledRegion], winner: str, costs: Sequence[Cost]
) -> CompiledRegion | None:
    """The winner's region; where that serves only some sizes, beside the cheapest of those that serve all, eager among them."""
    if winner not in alive or not _ranges(alive[winner]):
        return alive.get(winner)
    able = [name for name, made in alive.items() if not _ranges(made)]
    known = [cost for cost in costs if cost.engine in (*able, EAGER)]
    other = cheapest(known).engine if known else next(iter(able), EAGER)
    otherwise = alive.get(other)
    if otherwise is not None and otherwise.program is None:
        otherwise = reported(otherwise)  # plans call it: its errors are not the user's
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


def _building(engine: str, pending: PendingRegion) -> Refusal:
    how = f" with {attempts_in_words(pending.attempts)}" if pending.attempts else ""
    return Refusal(engine, Reason.BUILDING, f"it is being built{how}; until then another runs the region")


def _judgement(comparison: Comparison | None) -> tuple[float | None, str]:
    """The largest error of a region's results, and a note of how they were judged."""
    return (None, "") if comparison is None else (comparison.max_error, comparison.note)


def _after(attempts: Sequence[Attempt], refused: Refused) -> Refused:
    """The refusal of a region that was computed in several ways, all too far off."""
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
    judged: str = "",
) -> RegionDecision:
    """The plan's entry for a region that `engine` runs. `judged`: a note of how its results were judged."""
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
        note="; ".join(filter(None, [judged, compiled.note if compiled is not None else ""])),
    )


def _tried(
    region: Region,
    compiled: CompiledRegion,
    inputs: Sequence[torch.Tensor],
    config: Config,
    expected: Sequence[torch.Tensor] | None,
    deadline: Deadline,
    replay: Replay,
) -> tuple[CompiledRegion | PendingRegion, list[torch.Tensor], Comparison | None]:
    """A candidate refined and run once: what it became, its outputs, and their comparison with those that are `expected`, if any are.
    Where they are too far off it is made more accurate, step by step; one that is being built so is what it became."""

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


def _lost(region: Region, engine: str, winner: str, costs: Sequence[Cost]) -> Refusal:
    spent = {cost.engine: cost.microseconds for cost in costs}
    if engine in spent:
        why = f"it takes {time_in_words(spent[engine])}, {winner} {time_in_words(spent[winner])}"
    else:
        why = f"{winner} comes before it, and nothing is known of what they cost on {region.device}"
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
    """The cost of each living candidate and of eager, where it runs, which is last. A candidate that raises while timed is dropped. None of
    all where costs are to be estimated and the device is none that has an estimate."""
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
    """The costs of `calls`, one for each of the contenders (name -> version) and in their order.

    They are looked up under `key`, or timed against each other and kept, where eager is among them: what is kept is compared with
    eager. An exception of a call passes through.
    """
    timings = pricing.timings if EAGER in contenders and all(contenders.values()) else None
    key = timing_key(key, contenders)
    known = timings.get(TIMINGS, key, pricing.device) if timings is not None else KeptTimes()
    if known.keys() == contenders.keys() and max(known.values()) < math.inf:
        kind = "disturbed" if known.is_disturbed else "cached"
        return tuple(Cost(name, known[name], kind) for name in contenders)
    how = Rounds(until_decided=True, timer=pricing.timer, **rounds)
    load = OtherLoad()
    taken = measure([calls[name] for name in contenders], budget_s, **how)
    is_disturbed = load.is_felt()
    measured = {name: timing.low_us for name, timing in zip(contenders, taken, strict=True)}
    if timings is not None and max(measured.values()) < _IMPLAUSIBLE_RATIO * measured[EAGER]:
        timings.put(TIMINGS, key, pricing.device, measured, is_disturbed=is_disturbed)
    return tuple(Cost(name, cost, "disturbed" if is_disturbed else "measured") for name, cost in measured.items())


def cheapest(costs: Sequence[Cost]) -> Cost:
    """The least; of times that other load disturbed the first in order that takes not much longer: they tell little of each other."""
    least = min(costs, key=lambda cost: cost.microseconds)
    margin = MARGIN if any(cost.kind == "disturbed" for cost in costs) else 1.0
    return next(cost for cost in costs if cost.microseconds <= margin * least.microseconds)


def _version(version: str, compiled: CompiledRegion) -> str:
    """Key of all that a candidate's times depend on: its engine's version, its form, and the way it computes the region if not the first
    one. "" if times are not kept."""
    parts = [version, compiled.form, *(each.how for each in compiled.attempts[-1:])]
    return " ".join(filter(None, parts)) if version else ""


def timing_key(key: str, contenders: Mapping[str, str]) -> str:
    """Key of the times of contenders (name -> version) for the work `key`."""
    return json.dumps([key, sorted(contenders.items())])


def _warm(config: Config) -> Rounds:
    """All have run on these very inputs when they were compared: no round to warm up, and two that agree clearly are enough."""
    return Rounds() if config.verify == "off" else Rounds(warmup_rounds=0, min_rounds=2)


def _guarded(engine: str, run: Runner, inputs: Sequence[torch.Tensor]) -> None:
    try:
        with torch.no_grad():
            run(inputs)
    except failures(Exception) as error:  # whose it is decides what becomes of it
        raise _CandidateError(engine, error) from error
