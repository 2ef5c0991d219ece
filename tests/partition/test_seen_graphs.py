"""Graphs that were compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs, graph_key
from torch_hybrid_backend.storage.store import Store

X = torch.randn(4, 4)


def test_the_key_is_that_of_code_inputs_and_engines() -> None:
    """Equal graphs have equal keys; another operator, shape, dtype, number or engine makes another one."""

    def key(function: object = torch.sin, x: torch.Tensor = X, how: str = "1", more: tuple[object, ...] = ()) -> str:
        return graph_key(trace(function, X), [x, *more], how)  # type: ignore[arg-type]

    assert key() == key(x=torch.zeros(4, 4))
    with torch.no_grad():
        inference = key()
    others = [key(torch.cos), key(x=X[:2]), key(x=X.double()), key(how="2"), key(more=(3,)), inference]
    assert len({key(), *others}) == 1 + len(others)


def test_a_known_graph_is_known_to_a_later_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a store that cannot be written forgets, without an error."""
    known = SeenGraphs(Store(tmp_path))
    assert "k" not in known
    known.add("k")
    assert "k" in SeenGraphs(Store(tmp_path))

    def full(*_: object, **__: object) -> Path:
        raise CacheError("full")

    store = Store(tmp_path)
    monkeypatch.setattr(store, "put", full)
    SeenGraphs(store).add("another")
    assert "another" not in SeenGraphs(store)
