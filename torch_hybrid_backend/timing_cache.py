"""Timings kept on disk, so that a second process need not time again. Utility: imports the store.

An entry holds microseconds by name (of the engines that compete for a region, of the variants of a kernel) under a kind, a key and the
machine as it is for a device. The key says what was timed, versions included: a change of any of them is another entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.store import Store

_log = logging.getLogger(__name__)
_keeps: ContextVar[bool] = ContextVar("keeps timings", default=True)


@contextlib.contextmanager
def keeping_none() -> Iterator[None]:
    """What this thread times inside, beside the calls of others, is not kept: it tells of their load too. What is kept is found as ever."""
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


class TimingCache:
    """Microseconds by name, on a Store. `machine` says what timings on a device depend on, now (`machine.fingerprint`)."""

    def __init__(self, store: Store, machine: Callable[[Device], str]) -> None:
        self._store = store
        self._machine = machine

    def get(self, kind: str, key: str, device: Device) -> dict[str, float]:
        """Microseconds by name, infinity for what cannot run; empty where nothing usable is kept."""
        data = self._store.get(kind, self._key(key, device))
        try:
            times = {str(name): float(us) for name, us in json.loads(data or b"{}").items()}
        except (ValueError, AttributeError, TypeError):
            return {}
        return times if all(us >= 0 for us in times.values()) else {}

    def put(self, kind: str, key: str, device: Device, times: Mapping[str, float]) -> None:
        """Keep the times in place of what there was. A store that cannot be written costs a later process its timing: that is logged, not
        raised. Nothing is kept inside `keeping_none`."""
        if not _keeps.get():
            return
        data = json.dumps(dict(times), sort_keys=True).encode()
        try:
            self._store.remove(kind, self._key(key, device))
            self._store.put(kind, self._key(key, device), data, suffix=".json")
        except (CacheError, OSError) as error:
            _log.info("timings are not kept: %s", error)

    def _key(self, key: str, device: Device) -> str:
        return hashlib.sha256(json.dumps([key, self._machine(device)]).encode()).hexdigest()
