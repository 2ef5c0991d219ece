"""Plans of one graph or program by the sizes that they were laid out for; those not used for long go."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch_hybrid_backend.runtime.executor import Executor

# Plans kept: as many, and as long as their arenas together hold no more than this.
MAX_PLANS, MAX_ARENA_BYTES = 64, 256 << 20

Sizes = tuple[int, ...]
Run = Callable[[Sequence[Any]], list[Any]]
R = TypeVar("R", bound=Run)


class KeptPlans(Generic[R]):
    """Plans, each made once while it is kept. Threads may ask at once. Who makes them is not held: a graph that is dropped is gone at once, and
    its plans with it."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Sizes, R] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def at(self, sizes: Sizes, make: Callable[[Sizes], R]) -> R:
        """The plan for these sizes; where there is none, what `make` makes, in one thread at a time. What it raises is raised."""
        run = self._plans.get(sizes)
        if run is None:
            with self._lock:
                run = self._plans.get(sizes) or self._add(sizes, make(sizes))
        elif len(self._plans) > 1:
            with self._lock:
                if sizes in self._plans:
                    self._plans.move_to_end(sizes)
        return run

    def items(self) -> list[tuple[Sizes, R]]:
        """Sizes and plans, the one used last at the end."""
        return list(self._plans.items())

    def clear(self) -> bool:
        """Let go of all; whether there were any."""
        with self._lock:
            had_any = bool(self._plans)
            self._plans.clear()
        return had_any

    def _add(self, sizes: Sizes, run: R) -> R:
        self._plans[sizes] = run
        while len(self._plans) > 1 and (len(self._plans) > MAX_PLANS or self._arena_bytes() > MAX_ARENA_BYTES):
            self._plans.popitem(last=False)
        return run

    def _arena_bytes(self) -> int:
        return sum(run.arena_bytes for run in self._plans.values() if isinstance(run, Executor))
