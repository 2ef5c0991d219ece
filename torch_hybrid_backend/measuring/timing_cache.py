"""Timings kept on disk, so that a second process need not time again. Utility: imports the store.

An entry holds microseconds by name (of the engines that compete for a region, of the variants of a kernel) under a kind, a key and the
machine's fingerprint for a device. The key names what was timed, versions included: if any of them changes, the entry is another. Disturbed
times (`other_load`) are returned only after several processes have measured them, and none of these found a quiet machine.
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
_returned: ContextVar[str | None] = ContextVar("the kind of timings that are returned", default=None)  # None: all


@contextlib.contextmanager
def keeping_none() -> Iterator[None]:
    """Keep no times that this thread measures within the context, as calls of other threads disturb them. Kept times are still returned."""
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


@contextlib.contextmanager
def returning_only(kind: str) -> Iterator[None]:
    """Return no kept times of other kinds to this thread within the context, so that it takes them anew, and keeps them."""
    token = _returned.set(kind)
    try:
        yield
    finally:
        _returned.reset(token)


class KeptTimes(dict[str, float]):
    """Microseconds by name. `is_disturbed`: every process that measured them felt other load, so their differences mean little."""

    is_disturbed = False


_ENOUGH = 3  # after this many processes that found no quiet machine, further processes do not measure again


class TimingCache:
    """Microseconds by name, kept in a Store. `machine`: key of all that timings on a device depend on now (`machine.fingerprint`)."""

    def __init__(self, store: Store, machine: Callable[[Device], str]) -> None:
        self._store = store
        self._machine = machine
        self._counted: set[tuple[str, str]] = set()  # entries in whose `takers` this process is counted

    def get(self, kind: str, key: str, device: Device) -> KeptTimes:
        """Microseconds by name; infinity for a candidate that cannot run. Empty if nothing usable is kept, or if other load disturbed the times
        of too few processes: this process may find a quiet machine."""
        if _returned.get() not in (None, kind):
            return KeptTimes()
        return self._usable(kind, self.entry_key(key, device))

    def put(
        self, kind: str, key: str, device: Device, times: Mapping[str, float], *, is_disturbed: bool = False
    ) -> None:
        """Keep the times in place of earlier ones. A store that cannot be written is logged, not raised. Nothing is kept within `keeping_none`.

        is_disturbed: other load was felt during the measurement. Disturbed times never replace undisturbed ones. Of several disturbed times the
        shortest for each name are kept.
        """
        self.put_entry(kind, self.entry_key(key, device), times, is_disturbed=is_disturbed)

    def put_entry(self, kind: str, key: str, times: Mapping[str, float], *, is_disturbed: bool = False) -> None:
        """Keep times as `put` does, under an entry's key (`entry_key`), which may be another machine's."""
        if not _keeps.get():
            return
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

    def entries(self, kind: str) -> dict[str, KeptTimes]:
        """All times that `get` would return, by the keys of entries: those of other machines, too."""
        return {key: self._usable(kind, key) for key in self._store.keys(kind)}

    def entry_key(self, key: str, device: Device) -> str:
        """The key in the store of what is kept for this machine as it is now: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps([key, self._machine(device)]).encode()).hexdigest()

    def _usable(self, kind: str, key: str) -> KeptTimes:
        times, takers = self._kept(kind, key)
        if 0 < takers < _ENOUGH:
            return KeptTimes()
        times.is_disturbed = takers > 0
        return times

    def _kept(self, kind: str, key: str) -> tuple[KeptTimes, int]:
        """The kept times, and the number of processes that measured them under other load; 0 if the times are not disturbed."""
        data = self._store.get(kind, key)
        try:
            entry = json.loads(data or b'{"times": {}, "takers": 0}')
            times = KeptTimes({str(name): float(us) for name, us in entry["times"].items()})
            takers = int(entry["takers"])
        except (ValueError, AttributeError, TypeError, KeyError):
            return KeptTimes(), 0
        return (times, takers) if all(us >= 0 for us in times.values()) else (KeptTimes(), 0)
