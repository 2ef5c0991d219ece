"""Autotuning: finds the fastest variant of each kernel of a region by running the region on its real inputs.

Every kernel is timed in its place among the others: caches and weights are as they will be in calls. One run of the region times one variant of
every kernel; equal kernels share their times. Times are kept on disk, under the kernel's key and the machine.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch_hybrid_backend.codegen.assemble import RegionKernels
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.engine import ProgramCall, RunProgram
from torch_hybrid_backend.core.limits import MAX_HELD_BYTES
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.errors import HybridError, RefusedValuesError, is_sticky, tells_of_later

_log = logging.getLogger(__name__)

_MAX_ROUNDS = 20
# What a variant must gain before it takes the place of the one before it in the order of estimates: less is noise.
_MIN_GAIN = 0.02
# A kernel with a smaller share of its region's multiply-adds is not worth the time to compile variants of it.
_MIN_SHARE = 0.01
MIN_WORK = 1e6  # multiply-adds: some 10 us on one core
# An alternative that takes so many times as long by estimate is not timed. Two ways whose estimates are that far apart were never the other
# way round: the largest error of a ratio was 1.4 (docs/performance.md).
_CONCEIVABLE_COST = 1.6
# Behind a variant's name: the time of its operator alone, by which `library_probe` saw whether it was worth more.
ALONE = " alone"


@dataclass(frozen=True, slots=True, eq=False)
class CompiledVariant:
    """A variant, and the artifact of each of its kernels."""

    variant: Variant
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KernelOptions:
    """A kernel of a region and its variants: first those to compile, then those that were compiled. The variant at `best` is in use.

    `key`: the kernel's; "" if there is no choice. `is_open`: `search` has yet to choose. `times`: results of searches. `work`: multiply-adds.
    `untried`: variants that may still be compiled and timed. `exact`: the kernel itself, if no other variant here is exact; it is compiled when
    the accuracy check asks for it, which is seldom. `is_partial`: a variant is missing that other machines can compile, so times are of
    this process alone.
    """

    key: str
    to_compile: tuple[Variant, ...] = ()  # the best as far as is known first; none after `with_compiled`
    compiled: tuple[CompiledVariant, ...] = ()  # none before
    best: int = 0
    is_open: bool = False
    times: Mapping[str, float] = field(default_factory=dict)
    work: float = 0.0
    untried: tuple[Variant, ...] = ()
    exact: Variant | None = None
    is_partial: bool = False

    @staticmethod
    def of(
        key: str,
        variants: Sequence[Variant],
        times: Mapping[str, float],
        work: float = 0.0,
        *,
        most: int = 3,
        tuned: bool = False,
    ) -> KernelOptions:
        """Options by the `times` of earlier searches.

        Without times, `most` variants of kernels are to be compiled and timed, the one in use included, and all that call operators. If the
        kernel is to be tuned, variants without a time are left `untried`; else those to be probed are."""
        winner = fastest(variants, times)
        exact = None if winner.is_exact else variants[0]
        # An operator in use has the kernel itself to beat first; another variant is better than it by estimate, as others may be.
        in_order = variants if winner.calls_operator else (*variants[1:], variants[0])
        left = tuple(v for v in in_order if v.name not in times and v is not winner)
        if tuned:
            return KernelOptions(key, (winner,), times=times, work=work, untried=left, exact=exact)
        near = [v for v in left if v.cost <= _CONCEIVABLE_COST * winner.cost and not v.is_probed]
        of_kernels = [v for v in near if not v.calls_operator][: most - 1]
        new = () if times else (*(v for v in near if v.calls_operator), *of_kernels)
        unprobed = tuple(v for v in left if v.is_probed and v.name + ALONE not in times)
        is_open = not times and bool(new or unprobed)
        return KernelOptions(
            key, (winner, *new), is_open=is_open, times=times, work=work, untried=unprobed, exact=exact
        )

    def closed(self) -> KernelOptions:
        """The option with the choice left as it is."""
        return replace(self, to_compile=self.to_compile[:1], is_open=False, untried=())

    def with_compiled(self, made: Sequence[Sequence[Artifact | Exception]]) -> KernelOptions | Exception:
        """The option with compiled variants, or the exception of the first one. `made`: the artifacts of each variant of `to_compile`."""
        compiled: list[CompiledVariant] = []
        is_partial = False
        for variant, kernels in zip(self.to_compile, made, strict=True):
            each = compiled_variant(variant, kernels)
            if not isinstance(each, Exception):
                compiled.append(each)
            elif not compiled:
                return each
            else:
                _log.debug("the variant %r of a kernel is left out: %s", variant.name, each)
                is_partial = is_partial or not tells_of_later(each)
        is_open = self.is_open and bool(len(compiled) > 1 or self.untried)
        return replace(self, to_compile=(), compiled=tuple(compiled), is_open=is_open, is_partial=is_partial)

    @property
    def chosen(self) -> CompiledVariant:
        return self.compiled[self.best]

    def choosing(self, variant: Variant) -> KernelOptions:
        """The option with this variant in use, if it was compiled."""
        best = next((i for i, compiled in enumerate(self.compiled) if compiled.variant is variant), self.best)
        return self if best == self.best else replace(self, best=best)

    @property
    def missing(self) -> Variant | None:
        """The variant to compile before `with_exact`: the kernel itself, if no compiled variant is exact."""
        return None if any(compiled.variant.is_exact for compiled in self.compiled) else self.exact

    def with_exact(self, made: CompiledVariant | None) -> KernelOptions:
        """The option with the fastest of the exact variants; `made`: the artifacts of `missing`."""
        exact = tuple(compiled for compiled in (*self.compiled, made) if compiled and compiled.variant.is_exact)
        return replace(self, compiled=exact, best=0).decided({})

    def decided(self, times: Mapping[str, float]) -> KernelOptions:
        """The option after a choice by `times`, and by earlier times of variants that were not timed now."""
        known = {**self.times, **times}
        winner = fastest([compiled.variant for compiled in self.compiled], known)
        best = next(i for i, compiled in enumerate(self.compiled) if compiled.variant is winner)
        return replace(self, best=best, is_open=False, times=known)


def compiled_variant(variant: Variant, kernels: Sequence[Artifact | Exception]) -> CompiledVariant | Exception:
    """The variant with its artifacts, or the exception of its first kernel that was not compiled."""
    failed = next((kernel for kernel in kernels if isinstance(kernel, Exception)), None)
    if failed is not None:
        return failed
    return CompiledVariant(variant, tuple(made for made in kernels if not isinstance(made, Exception)))


def limited(options: Sequence[KernelOptions], further: int = 1, least: int = 4) -> list[KernelOptions]:
    """The options with choices closed that are not worth the compile time: those of kernels with little work, and those beyond a quarter
    of the kernels (and beyond `least`), each of which counts as `further` more kernels to compile."""
    total = sum(each.work for each in options)
    by_key: dict[str, list[KernelOptions]] = {}
    for each in options:
        by_key.setdefault(each.key or f"closed {id(each)}", []).append(each)
    most_work_first = sorted(by_key.items(), key=lambda item: -sum(each.work for each in item[1]))
    left = further * max(least, -(-len(by_key) // 4))
    closed: set[str] = set()
    for key, equal in most_work_first:
        # What an earlier process timed counts, too: this one is not to go on where that stopped.
        timed = sum(not name.endswith(ALONE) for name in equal[0].times)
        left -= max(timed - 1, sum(max(1, v.compiled_kernels) for v in equal[0].to_compile[1:]))
        if left < 0 or sum(each.work for each in equal) < max(_MIN_SHARE * total, MIN_WORK):
            closed.add(key)
    return [each.closed() if each.is_open and each.key in closed else each for each in options]


def fastest(variants: Sequence[Variant], times: Mapping[str, float]) -> Variant:
    """The variant to use. Without times: the preferred one, else the first. A later variant must be faster by more than noise."""
    if not any(variant.name in times for variant in variants):
        return next((variant for variant in variants if variant.is_preferred), variants[0])
    best = variants[0]
    for other in variants[1:]:
        us, best_us = times.get(other.name), times.get(best.name, math.inf)
        if us is not None and us < best_us * (1 - _MIN_GAIN):
            best = other
    return best


def program_of(kernels: RegionKernels, chosen: Sequence[CompiledVariant]) -> Program:
    """The region's program with one variant of each kernel."""
    artifacts = [artifact for compiled in chosen for artifact in compiled.artifacts]
    return kernels.with_variants([compiled.variant for compiled in chosen]).program(artifacts)


def _one_by_one(options: Sequence[KernelOptions], failed: Sequence[CompiledVariant]) -> list[list[CompiledVariant]]:
    """A set of variants that cannot run, as sets of one variant each; none if the set had only one."""
    keys = dict.fromkeys(o.key for o, one in zip(options, failed, strict=True) if one is not o.chosen)
    if len(keys) < 2:
        return []
    return [[one if o.key == key else o.chosen for o, one in zip(options, failed, strict=True)] for key in keys]


def search(
    kernels: RegionKernels,
    options: Sequence[KernelOptions],
    run_program: RunProgram,
    inputs: Sequence[torch.Tensor],
    budget_s: float,
    least_rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Microseconds of the variants of every open kernel: kernel key -> variant name -> time.

    The region runs with every kernel's first variant, then with every kernel's second, and so on, in `least_rounds` rounds or more
    after one to warm up. A run that raises HybridError gives no times. Each of its variants then has a run of its own, beside those in use: an
    operator that refuses such tensors says nothing of the others. RefusedValuesError is raised, and so is an error that leaves the device
    unusable.

    Each run packs its weights, and has an arena of its own on a device. Runs take turns, round by round, except in two cases, in which each run
    is freed before the next is made: the arenas together are large, or the first round spends the budget.
    """
    sets: list[list[CompiledVariant]] = []
    for number in range(max((len(option.compiled) for option in options if option.is_open), default=0)):
        sets.append([o.compiled[number] if o.is_open and number < len(o.compiled) else o.chosen for o in options])
    samples: dict[tuple[int, str], list[float]] = {}

    def time_once(chosen: Sequence[CompiledVariant], run: ProgramCall) -> list[tuple[tuple[int, str], float]] | None:
        try:
            times = iter(run.kernel_us(inputs))
        except HybridError as error:
            if is_sticky(error) or isinstance(error, RefusedValuesError):
                raise
            _log.info("a set of variants cannot run: %s", error)
            return None
        spent = [sum(next(times, math.nan) for _ in compiled.artifacts) for compiled in chosen]
        named = [(position, compiled.variant.name) for position, compiled in enumerate(chosen)]
        timed = zip(named, spent, strict=True)
        return [(name, us) for name, us in timed if options[name[0]].is_open and not math.isnan(us)]

    def sample(chosen: Sequence[CompiledVariant], run: ProgramCall) -> None:
        for name, us in time_once(chosen, run) or ():
            samples.setdefault(name, []).append(us)

    start = clock()
    runs: list[tuple[list[CompiledVariant], ProgramCall]] = []
    one_by_one = False
    for number, chosen in enumerate(sets):  # which grows
        run = run_program(program_of(kernels, chosen))
        if time_once(chosen, run) is None:  # memory is new
            run.release()
            sets += _one_by_one(options, chosen)
            continue
        began = clock()
        sample(chosen, run)
        if number == 0:
            is_slow = least_rounds <= 1 and 2 * len(sets) * (clock() - began) >= budget_s
            one_by_one = is_slow or (len(sets) - 1) * run.arena_bytes > MAX_HELD_BYTES
        if one_by_one:
            rounds = 1
            while rounds < least_rounds or (rounds < _MAX_ROUNDS and clock() - began < budget_s / len(sets)):
                sample(chosen, run)
                rounds += 1
            run.release()
        else:
            runs.append((chosen, run))
    rounds = 2
    while runs and len(sets) > 1 and (rounds <= least_rounds or (rounds < _MAX_ROUNDS and clock() - start < budget_s)):
        for chosen, run in runs:
            sample(chosen, run)
        rounds += 1
    for _, run in runs:
        run.release()
    of_equal_kernels: dict[tuple[str, str], list[float]] = {}
    for (position, name), taken in samples.items():
        of_equal_kernels.setdefault((options[position].key, name), []).append(min(taken))
    found: dict[str, dict[str, float]] = {}
    for (key, name), shortest in of_equal_kernels.items():
        found.setdefault(key, {})[name] = statistics.fmean(shortest)
    return found
