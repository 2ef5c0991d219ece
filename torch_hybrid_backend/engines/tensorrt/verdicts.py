"""Verdicts that are kept: judging imports torch_tensorrt, which takes seconds, and lowers each form of an operator, which takes 25 ms.

verdicts = Verdicts(store, versions)
verdicts.of(form, lambda: judge(node))      # judged once for all processes of one user, while versions are the same
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
    """Verdicts by form: in memory, and in a store for later processes. `versions`: what else they depend on."""

    def __init__(self, store: Store, versions: str) -> None:
        self._store = store
        self._versions = versions
        self._known: dict[str, Verdict] = {}

    def of(self, form: str, judge: Callable[[], Verdict]) -> Verdict:
        """The verdict on a form. What raises is not kept."""
        found = self._known.get(form)
        if found is None:
            key = hashlib.sha256(f"{self._versions}\0{form}".encode()).hexdigest()
            found = _read(self._store.get(KIND, key))
            if found is None:
                found = judge()
                self._keep(key, found)
            self._known[form] = found
        return found

    def _keep(self, key: str, verdict: Verdict) -> None:
        try:
            self._store.remove(KIND, key)  # what cannot be read
            self._store.put(KIND, key, json.dumps(asdict(verdict)).encode(), suffix=".json")
        except failures(CacheError, OSError) as error:
            _log.info("a verdict of TensorRT's is not kept: %s", error)


def _read(data: bytes | None) -> Verdict | None:
    """Read what `_keep` wrote; None for anything else."""
    try:
        said = json.loads(data or b"null")
        return Refused(Reason(said["code"]), str(said["why"])) if said else None if said is None else Supported()
    except (ValueError, TypeError, KeyError):
        return None
