"""Timings kept on disk, so that a second process need not time again. Utility: imports the store.

An entry holds microseconds by name (of the engines that compete for a region, of the variants of a kernel) under a kind, a key and the
machine as it is for a device. The key says what was timed, versions included: a change of any of them is another entry. Times that other load
disturbed are found only once several processes have taken them, none of which met a quiet machine (`other_load`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import CacheError, failures
from torch_hybrid_backend.storage.store import Store

_log = logging.getLogger(__name__)
_keeps: ContextVar[bool] = ContextVar("keeps timings", default=True)


@contextlib.contextmanager
def keeping_none() -> Iterator[None]:
    """Keep no times that this thread takes inside, beside the calls of others: they tell of that load too. What is kept is found as ever."""
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


class KeptTimes(dict[str, float]):
    """Microseconds by name. `is_disturbed`: other load was felt by every process that took them, so that they tell little of each other."""

    is_disturbed = False


_ENOUGH = 3  # so many processes that never met a quiet machine need not be followed by others


class TimingCache:
    """Microseconds by name, on a Store. `machine` says what timings on a device depend on, now (`machine.fingerprint`)."""

    def __init__(self, store: Store, machine: Callable[[Device], str]) -> None:
        self._store = store
        self._machine = machine
        self._counted: set[tuple[str, str]] = set()  # the entries of which this process is one of the takers

    def get(self, kind: str, key: str, device: Device) -> KeptTimes:
        """Microseconds by name, infinity for what cannot run; empty where nothing usable is kept, and where other load disturbed what few
        processes took: one more may meet a quiet machine."""
        times, takers = self._kept(kind, self._key(key, device))
        if 0 < takers < _ENOUGH:
            return KeptTimes()
        times.is_disturbed = takers > 0
        return times

    def put(
        self, kind: str, key: str, device: Device, times: Mapping[str, float], *, is_disturbed: bool = False
    ) -> None:
        """Keep the times in place of what there was. A store that cannot be written costs a later process its timing: that is logged, not
        raised. Nothing is kept inside `keeping_none`.

        is_disturbed: other load was felt while they were taken. They only add to what was taken without; of several that were disturbed, the
        shortest of each are kept.
        """
        if not _keeps.get():
            return
        key = self._key(key, device)
        entry, takers = dict(times), 0
        if is_disturbed:
            before, takers = self._kept(kind, key)
            if before and not takers:
                entry = {**times, **before}
            else:
                entry = {name: min(us, before.get(name, math.inf)) for name, us in {**before, **times}.items()}
                takers += (kind, key) not in self._counted
                self._counted.add((kind, key))
        data = json.dumps({"takers": takers, "times": entry}, sort_keys=True).encode()
        try:
            self._store.remove(kind, key)
            self._store.put(kind, key, data, suffix=".json")
        except failures(CacheError, OSError) as error:
            _log.info("timings are not kept: %s", error)

    def _kept(self, kind: str, key: str) -> tuple[KeptTimes, int]:
        """Times that are kept, and the number of processes that took them beside other load: 0 if they are not disturbed."""
        data = self._store.get(kind, key)
        try:
            entry = json.loads(data or b'{"times": {}, "takers": 0}')
            times = KeptTimes({str(name): float(us) for name, us in entry["times"].items()})
            takers = int(entry["takers"])
        except (ValueError, AttributeError, TypeError, KeyError):
            return KeptTimes(), 0
        return (times, takers) if all(us >= 0 for us in times.values()) else (KeptTimes(), 0)

    def _key(self, key: str, device: Device) -> str:
        return hashlib.sha256(json.dumps([key, self._machine(device)]).encode()).hexdigest()
