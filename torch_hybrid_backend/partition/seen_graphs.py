"""Keys of graphs that were compiled before, kept on disk. Their kernels are in the cache, so no engine need prepare to compile.

If a known graph is taken for unknown, an engine prepares in vain. If an unknown graph is taken for known, the engine prepares later. Neither
changes a result.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch
import torch.fx

from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage.store import Store

_log = logging.getLogger(__name__)
_KIND = "graphs"


def graph_key(gm: torch.fx.GraphModule, example_inputs: Sequence[object], how: str) -> str:
    """SHA-256 of Dynamo's graph as code, the forms of its inputs, and `how`: versions and settings of the engines that compile it."""
    forms = [
        f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in example_inputs
    ]
    return hashlib.sha256("\n".join([gm.code, how, str(torch.is_grad_enabled()), *forms]).encode()).hexdigest()


class SeenGraphs:
    """The keys of graphs that a store has seen compiled."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __contains__(self, key: str) -> bool:
        return self._store.get(_KIND, key) is not None

    def add(self, key: str) -> None:
        """Add a key. A store that cannot be written is logged, not raised."""
        try:
            self._store.put(_KIND, key, b"true", suffix=".json")
        except CacheError as error:
            _log.info("a graph is not remembered: %s", error)
