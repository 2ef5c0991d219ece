"""Verdicts on operators, kept on disk. Checking an operator imports torch_tensorrt, which takes seconds, and lowers the operator, 25 ms a form.

verdicts = Verdicts(store, versions)
verdicts.of(form, lambda: check(node))      # checked once for all processes of one user, while the versions stay the same
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.errors import CacheError, failures
from torch_hybrid_backend.storage.store import Store

_log = logging.getLogger(__name__)
KIND = "tensorrt-verdicts"


class Verdicts:
    """Verdicts by an operator's form, in memory and in a store for later processes. `versions`: everything else that verdicts depend on."""

    def __init__(self, store: Store, versions: str) -> None:
        self._store = store
        self._versions = versions
        self._known: dict[str, Verdict] = {}

    def of(self, form: str, check: Callable[[], Verdict]) -> Verdict:
        """The verdict on a form. If `check` raises, nothing is kept."""
        found = self._known.get(form)
        if found is None:
            key = hashlib.sha256(f"{self._versions}\0{form}".encode()).hexdigest()
            found = _read(self._store.get(KIND, key))
            if found is None:
                found = check()
                self._keep(key, found)
            self._known[form] = found
        return found

    def _keep(self, key: str, verdict: Verdict) -> None:
        try:
            self._store.remove(KIND, key)  # an entry that cannot be read
            self._store.put(KIND, key, json.dumps(asdict(verdict)).encode(), suffix=".json")
        except failures(CacheError, OSError) as error:
            _log.info("a verdict of TensorRT's is not kept: %s", error)


def _read(data: bytes | None) -> Verdict | None:
    """The verdict that `_keep` wrote; None for any other data."""
    try:
        said = json.loads(data or b"null")
        return Refused(Reason(said["code"]), str(said["why"])) if said else None if said is None else Supported()
    except (ValueError, TypeError, KeyError):
        return None
