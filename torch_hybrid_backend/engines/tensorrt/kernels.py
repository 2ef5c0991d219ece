"""Kernels that TensorRT compiles in calls, kept on disk: TensorRT-RTX's engines have none for the GPU until they run, and its runtime cache
holds those that were made.

They lie in our store under the key of their engine, which names the GPU, its driver and TensorRT's version. What cannot be read, or TensorRT
does not take, is dropped: kernels are then compiled again.
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
        """Hand an engine what earlier processes kept, before it has contexts."""
        found = self._store.get(KIND, self._key)
        if found is None:
            return
        if engine.take_kernels(found):
            self._kept = found
        else:
            _log.info("TensorRT does not take the kernels that were kept for an engine: they are compiled again")
            self._store.remove(KIND, self._key)

    def keep(self, engine: LoadedEngine) -> None:
        """Write what the engine has now, where that is anything new. It never fails: a full disk costs the next process its time only."""
        compiled = engine.compiled_kernels()
        if not compiled or compiled == self._kept:
            return
        self._kept = compiled
        try:
            self._store.remove(KIND, self._key)
            self._store.put(KIND, self._key, compiled)
        except CacheError as error:
            _log.warning("kernels that TensorRT compiled are not kept: %s", error)
