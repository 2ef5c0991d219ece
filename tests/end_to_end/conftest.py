"""Fixtures of the end-to-end tests: a cache of their own, a fresh Dynamo, clean settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.fault_processes import Nursery


@pytest.fixture(autouse=True)
def settings(kernel_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings as on a new user's machine, except that placement does not time: these models are small enough for eager to win."""
    for name in [name for name in os.environ if name.startswith("HYBRID_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(kernel_directory))
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")
    torch._dynamo.reset()
    yield monkeypatch
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Real processes, quickly."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def filled_cache(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that two calls of `check` leave: kernels and timings, two of each, and that the graphs are known."""
    folder = tmp_path_factory.mktemp("filled")
    done = nursery.run("check(6); check(7)", folder, HYBRID_PLACEMENT="measure")
    assert (len(done.answers), done.status) == (2, 0), done
    assert {path.name for path in (folder / "cache").iterdir()} == {"captures", "graphs", "kernels", "placements"}
    return folder / "cache"
