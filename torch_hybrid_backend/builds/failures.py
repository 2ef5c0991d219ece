"""Compilations that failed, remembered for a day: a process started next does not spend ten minutes on the same failure. Engines that opaque
builders make, and kernels.

What is remembered lies in the store, under the build's kind and key. A key says all that the result depends on, versions and device
included, so another version is tried at once; what missed its deadline is tried again with a later one. Only what lies in the build itself is
remembered: not what came from outside (`CompileError.recurs`), nor a missed deadline where others had the processors meanwhile.
`hybrid cache` shows failures, and `hybrid cache --forget-failures` forgets them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.errors import (
    AccuracyError,
    CacheError,
    CompileError,
    CompilerCrashError,
    DeadlineError,
    failures,
)
from torch_hybrid_backend.storage.store import Store

_log = logging.getLogger(__name__)

KIND = "failed-builds"
REMEMBERED_S = 24 * 3600.0
# What missed its deadline is too slow, rather than one of many or on a busy machine, if a processor worked for it for so much of its time.
_SLOW_SHARE = 0.5
_TYPES: dict[str, type[CompileError]] = {
    kind.__name__: kind for kind in (AccuracyError, CompileError, CompilerCrashError, DeadlineError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A build that failed. `at`: when, in seconds since 1970; `error`: its class, one of AccuracyError, CompileError, CompilerCrashError and
    DeadlineError; `limit_s`: the deadline that it had, in seconds."""

    kind: str
    key: str
    at: float
    error: str
    message: str
    limit_s: float

    def as_exception(self) -> CompileError:
        """The error that the build raised, once more."""
        return _TYPES.get(self.error, CompileError)(
            f"{self.message} (at {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.at))}; tried again a day later, or after `hybrid cache "
            "--forget-failures`)"
        )


class Failures:
    """The failures in a store. `clock` gives seconds since 1970; a test gives its own."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def get(self, kind: str, key: str, limit_s: float = 0.0) -> Failure | None:
        """The failure that is remembered of a build that may take `limit_s` seconds; one that is a day old, or of a day to come, is forgotten.
        One that missed its deadline says nothing where there is more time than it had. 0: whatever there is."""
        entry = _entry(kind, key)
        found = _parsed(self._store.get(KIND, entry))
        if found is None or (found.kind, found.key) != (kind, key) or not 0 <= self._clock() - found.at < REMEMBERED_S:
            self._store.remove(KIND, entry)
            return None
        return None if found.error == DeadlineError.__name__ and limit_s > found.limit_s else found

    def put(self, kind: str, key: str, error: CompileError, limit_s: float = math.inf) -> None:
        """Remember that the build, which might have taken `limit_s` seconds, failed with `error`, where that would recur. A store that cannot
        be written costs a later process its time: that is logged."""
        had_s = error.had_s if isinstance(error, DeadlineError) else None
        if not error.recurs or (had_s is not None and had_s < _SLOW_SHARE * limit_s):
            return
        name = type(error).__name__ if type(error).__name__ in _TYPES else CompileError.__name__
        fields = {
            "kind": kind,
            "key": key,
            "at": self._clock(),
            "error": name,
            "message": str(error),
            "limit_s": limit_s,
        }
        try:
            self._store.remove(KIND, _entry(kind, key))
            self._store.put(KIND, _entry(kind, key), json.dumps(fields).encode(), suffix=".json")
        except failures(CacheError, OSError) as cannot:
            _log.info("a failed build is not remembered: %s", cannot)

    def remove(self, kind: str, key: str) -> None:
        """Forget one, where there is one."""
        self._store.remove(KIND, _entry(kind, key))

    def all(self) -> list[Failure]:
        """Those that are remembered, the latest first."""
        found = (_parsed(self._store.get(KIND, entry)) for entry in self._store.keys(KIND))
        alive = [one for one in found if one is not None and 0 <= self._clock() - one.at < REMEMBERED_S]
        return sorted(alive, key=lambda failure: -failure.at)

    def forget(self) -> None:
        """Forget them all."""
        for entry in self._store.keys(KIND):
            self._store.remove(KIND, entry)


def _entry(kind: str, key: str) -> str:
    return hashlib.sha256(json.dumps([kind, key]).encode()).hexdigest()


def _parsed(data: bytes | None) -> Failure | None:
    try:
        fields = json.loads(data or b"")
        return Failure(
            str(fields["kind"]),
            str(fields["key"]),
            float(fields["at"]),
            str(fields["error"]),
            str(fields["message"]),
            float(fields["limit_s"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
