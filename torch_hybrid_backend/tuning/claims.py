"""Claims: variants of kernels shared out among processes that time them, and the times that are known.

A process claims the next variant of each kernel of a region, one round's work, and reports their times. A process that ends in between costs
that round: its claims are free again (`drop`). Two processes never time one variant, so two machines need half of the rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel with variants to try. `key`: of its times' entry (`TimingCache.entry_key`). `chosen`: the variant in use. `times`: microseconds
    by variant, as the process knows them. `untried`: names, in the order in which they are to be tried."""

    key: str
    chosen: str
    times: Mapping[str, float]
    untried: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in which a process had a host for itself, in seconds of the host's monotonic clock. `host`: its boot id."""

    host: str
    worker: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Entry:
    """All times of a kernel's variants. `is_disturbed`: other load was felt."""

    times: Mapping[str, float]
    is_disturbed: bool


@dataclass(frozen=True, slots=True)
class State:
    """Progress of tuning.

    `entries`: by key, those that changed since the last time. `tried`, `left`: numbers of variants. `faster`: kernels of which a faster variant
    is chosen now. `before_us`, `now_us`: microseconds of all kernels that were timed, each counted once. `is_over`: nothing more is claimed.
    `is_disturbed`: other load was felt.
    """

    entries: Mapping[str, Entry]
    kernels: int
    faster: int
    tried: int
    left: int
    before_us: float
    now_us: float
    is_over: bool
    is_disturbed: bool
    intervals: tuple[Interval, ...]


@dataclass(slots=True)
class _Kernel:
    before: str
    chosen: str  # the fastest of those that processes have chosen
    times: dict[str, float]
    names: set[str]
    done: set[str] = field(default_factory=set)  # in this run, with times or without
    claimed: dict[str, str] = field(default_factory=dict)  # variant -> process
    is_disturbed: bool = False

    @property
    def left(self) -> set[str]:
        return self.names - self.times.keys() - self.done


class Claims:
    """Owns what is known of each kernel. Not thread-safe: calls come one at a time, as an actor's do."""

    def __init__(
        self,
        known: Mapping[str, Mapping[str, float]],
        budget_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`known`: times of earlier runs, by entry. `budget_s`: seconds from now after which nothing more is claimed."""
        self._known = known
        self._clock = clock
        self._until = clock() + budget_s
        self._kernels: dict[str, _Kernel] = {}
        self._changed: set[str] = set()
        self._intervals: list[Interval] = []

    def claim(self, worker: str, wanted: Sequence[Wanted]) -> dict[str, str]:
        """The variants that a process is to try now, by key; empty if none is left for it, or time is over."""
        for each in wanted:
            kernel = self._kernels.get(each.key)
            if kernel is None:
                kernel = self._kernels[each.key] = _Kernel(
                    each.chosen, each.chosen, dict(self._known.get(each.key, {})), set()
                )
            kernel.names.update(each.untried)
            self._merge(each.key, each.chosen, each.times)
        if self._is_over:
            return {}
        claimed: dict[str, str] = {}
        for each in wanted:
            kernel = self._kernels[each.key]
            free = kernel.left - kernel.claimed.keys()
            name = next((name for name in each.untried if name in free), None)
            if name is not None:
                kernel.claimed[name] = worker
                claimed[each.key] = name
        return claimed

    def report(self, worker: str, found: Sequence[Wanted], is_disturbed: bool) -> None:
        """Take the times of a round. Claims of the process that have no time now are not tried again in this run."""
        for each in found:
            kernel = self._kernels[each.key]
            kernel.is_disturbed |= is_disturbed
            for name in [name for name, owner in kernel.claimed.items() if owner == worker]:
                del kernel.claimed[name]
                kernel.done.add(name)
            self._merge(each.key, each.chosen, each.times)

    def used(self, interval: Interval) -> None:
        """Take a time in which a process had its host for itself."""
        self._intervals.append(interval)

    def drop(self, worker: str) -> None:
        """Let others claim what a process that ended had claimed."""
        for kernel in self._kernels.values():
            kernel.claimed = {name: owner for name, owner in kernel.claimed.items() if owner != worker}

    def stop(self) -> None:
        """Let nothing be claimed any more."""
        self._until = -math.inf

    def entries(self) -> dict[str, Entry]:
        """All that is known, by key."""
        return {key: self._entry(key) for key in self._kernels}

    def state(self) -> State:
        """Progress of tuning; entries are those that changed since the last call."""
        entries = {key: self._entry(key) for key in self._changed}
        self._changed.clear()
        timed = [
            (before, kernel.times[kernel.chosen])
            for kernel in self._kernels.values()
            if math.isfinite(before := kernel.times.get(kernel.before, math.inf)) and kernel.chosen in kernel.times
        ]
        return State(
            entries,
            kernels=len(self._kernels),
            faster=sum(now < before for before, now in timed),
            tried=sum(len(kernel.names - kernel.left) for kernel in self._kernels.values()),
            left=sum(len(kernel.left) for kernel in self._kernels.values()),
            before_us=sum(before for before, _ in timed),
            now_us=sum(now for _, now in timed),
            is_over=self._is_over,
            is_disturbed=any(kernel.is_disturbed for kernel in self._kernels.values()),
            intervals=tuple(self._intervals),
        )

    def _entry(self, key: str) -> Entry:
        return Entry(dict(self._kernels[key].times), self._kernels[key].is_disturbed)

    @property
    def _is_over(self) -> bool:
        return self._clock() >= self._until

    def _merge(self, key: str, chosen: str, times: Mapping[str, float]) -> None:
        """Add times of variants that are not known yet. Machines and days are compared through a variant that both have timed."""
        known = self._kernels[key].times
        shared = [
            name
            for name in (chosen, *times)
            if 0 < known.get(name, 0.0) < math.inf and 0 < times.get(name, 0.0) < math.inf
        ]
        scale = known[shared[0]] / times[shared[0]] if shared else 1.0
        new = {name: us * scale for name, us in times.items() if name not in known}
        if new:
            known.update(new)
            self._changed.add(key)
        kernel = self._kernels[key]
        if known.get(chosen, math.inf) < known.get(kernel.chosen, math.inf):
            kernel.chosen = chosen
