"""Kernels that TensorRT-RTX compiles in calls, kept on disk. Its engines have no GPU kernels until they run; its runtime cache holds the
compiled kernels.

The store keeps them under the key of their engine, which covers the GPU, its driver and TensorRT's version. Kernels that cannot be read are
dropped and compiled again, and so are those that TensorRT rejects.
"""

from __future__ import annotations

import logging

from torch_hybrid_backend.engines.tensorrt.runtime import LoadedEngine
from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage.store import Store

_log = logging.getLogger(__name__)
KIND = "tensorrt-kernels"


class KeptKernels:
    """The kernels of one engine in a store, by the engine's key."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._kept = b""

    def give(self, engine: LoadedEngine) -> None:
        """Give an engine the kernels that earlier processes kept. Call this before the engine makes contexts."""
        found = self._store.get(KIND, self._key)
        if found is None:
            return
        if engine.take_kernels(found):
            self._kept = found
        else:
            _log.info("TensorRT rejects the kernels that were kept for an engine: they are compiled again")
            self._store.remove(KIND, self._key)

    def keep(self, engine: LoadedEngine) -> None:
        """Store the engine's kernels if there are new ones. Never fails: after a full disk, the next process compiles them again."""
        compiled = engine.compiled_kernels()
        if not compiled or compiled == self._kept:
            return
        self._kept = compiled
        try:
            self._store.remove(KIND, self._key)
            self._store.put(KIND, self._key, compiled)
        except CacheError as error:
            _log.warning("kernels that TensorRT compiled are not kept: %s", error)
