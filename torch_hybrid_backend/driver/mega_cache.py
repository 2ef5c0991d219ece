"""Entries of the cache in PyTorch's portable form: `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`.

Every entry that this process finds or writes is recorded: traced graphs, kernels, timings. Failures are not, as they may be this machine's own,
nor are entries of more than 64 MiB.
Loading puts entries into the cache of the environment's settings (`HYBRID_CACHE_DIR`), beside what is there. PyTorch drops everything that was
saved if one of the types in it is not registered: this package must be imported before `load_cache_artifacts` is called, and after torch.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage.store import Content, Store, tell
from torch_hybrid_backend.torch_private import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

_log = logging.getLogger(__name__)
TYPE = "hybrid"
# Of an entry that is recorded: PyTorch keeps all of them in memory until the process ends, and engines of TensorRT hold weights.
_MOST_BYTES = 64 << 20
_loaded: set[tuple[str, str]] = set()  # entries that the cache has from what was loaded


class HybridCacheArtifact(CacheArtifact):
    """Entry of the cache. Its key here has three names with / between them: kind, key, and the suffix without its dot."""

    @staticmethod
    def type() -> str:
        """The name that PyTorch keeps entries under."""
        return TYPE

    def populate_cache(self) -> None:
        """Put the entry into the cache, unless it had one before. Of several under one key, as of timings taken again, the last counts. A cache
        that cannot be written gives a WARNING."""
        try:
            store = _store()
            if store is None:
                _log.info("the cache is switched off, so what was saved is not loaded")
                return
            kind, key, suffix = _names(self.key)
            if (kind, key) in _loaded:
                store.remove(kind, key)
            if store.add(Content(kind, key, f".{suffix}", self.content)):
                _loaded.add((kind, key))
        except CacheError as error:
            _log.warning("an entry of the saved cache is not used: %s", error)


@functools.cache
def register() -> None:
    """Let PyTorch save and load entries, and record them from now on."""
    CacheArtifactFactory.register(HybridCacheArtifact)
    tell(_record)


def _record(content: Content) -> None:
    if content.is_portable and len(content.data) <= _MOST_BYTES:
        key = f"{content.kind}/{content.key}/{content.suffix.removeprefix('.')}"
        CacheArtifactManager.record_artifact(TYPE, key, content.data)


def _names(key: Any) -> tuple[str, str, str]:
    """Kind, key and suffix of an artifact's key. Raises CacheError for a key of another form; the store checks each name."""
    names = str(key).split("/")
    if len(names) != 3:
        raise CacheError(f"{key!r} names no cache entry; it must be a kind, a key and a suffix with / between them")
    kind, key, suffix = names
    return kind, key, suffix


def _store() -> Store | None:
    from torch_hybrid_backend.config import Config

    config = Config.from_env(os.environ)
    return _open(config) if config.cache else None


@functools.lru_cache(1)
def _open(config: Any) -> Store:
    return Store(config.cache_dir, config.cache_limit_mib << 20)
