"""Failed builds of engines and kernels, remembered for a day, so that the next process does not spend ten minutes on the same failure.

Failures lie in the store, under the build's kind and key. A key names all that the result depends on, versions and device included, so another
version is tried at once. A build that missed its deadline is tried again with a later deadline. Only failures that would recur are remembered:
none with an outside cause (`CompileError.recurs`), and no missed deadline while other programs used the processors.
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
from torch_hybrid_backend.storage.store import FAILURES, Store

_log = logging.getLogger(__name__)

REMEMBERED_S = 24 * 3600.0
# The share of its time for which a processor worked on a build. From this share on, a build that missed its deadline is too slow; below it,
# other work may have delayed the build.
_SLOW_SHARE = 0.5
_TYPES: dict[str, type[CompileError]] = {
    kind.__name__: kind for kind in (AccuracyError, CompileError, CompilerCrashError, DeadlineError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A build that failed. `at`: its time, in seconds since 1970. `error`: its class, one of AccuracyError, CompileError, CompilerCrashError
    and DeadlineError. `limit_s`: its deadline, in seconds."""

    kind: str
    key: str
    at: float
    error: str
    message: str
    limit_s: float

    def as_exception(self) -> CompileError:
        """The error that the build raised."""
        return _TYPES.get(self.error, CompileError)(
            f"{self.message} (at {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.at))}; tried again a day later, or after `hybrid cache "
            "--forget-failures`)"
        )


class Failures:
    """The failures in a store. `clock`: seconds since 1970; tests pass their own."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def get(self, kind: str, key: str, limit_s: float = 0.0) -> Failure | None:
        """The remembered failure of a build that may take `limit_s` seconds; None if there is none. 0: any time.

        A missed deadline counts only if `limit_s` is not longer than that deadline. A failure that is a day old, or in the future, is
        removed."""
        entry = _entry(kind, key)
        failure = _parsed(self._store.get(FAILURES, entry))
        if (
            failure is None
            or (failure.kind, failure.key) != (kind, key)
            or not 0 <= self._clock() - failure.at < REMEMBERED_S
        ):
            self._store.remove(FAILURES, entry)
            return None
        return None if failure.error == DeadlineError.__name__ and limit_s > failure.limit_s else failure

    def put(self, kind: str, key: str, error: CompileError, limit_s: float = math.inf) -> None:
        """Remember that a build, whose deadline was `limit_s` seconds, failed with `error`, if the error would recur. A store that cannot
        be written is logged, not raised."""
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
            self._store.remove(FAILURES, _entry(kind, key))
            self._store.put(FAILURES, _entry(kind, key), json.dumps(fields).encode(), suffix=".json")
        except failures(CacheError, OSError) as cannot:
            _log.info("a failed build is not remembered: %s", cannot)

    def remove(self, kind: str, key: str) -> None:
        """Forget the failure of a build, if there is one."""
        self._store.remove(FAILURES, _entry(kind, key))

    def all(self) -> list[Failure]:
        """The remembered failures, the latest first."""
        kept = (_parsed(self._store.get(FAILURES, entry)) for entry in self._store.keys(FAILURES))
        alive = [one for one in kept if one is not None and 0 <= self._clock() - one.at < REMEMBERED_S]
        return sorted(alive, key=lambda failure: -failure.at)

    def forget(self) -> None:
        """Forget all failures."""
        for entry in self._store.keys(FAILURES):
            self._store.remove(FAILURES, entry)


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
