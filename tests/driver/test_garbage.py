"""The collector, held back while graphs are compiled."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo.utils

from torch_hybrid_backend.driver.garbage import FullCollections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def _make_objects() -> None:
    """Enough that stay for a full collection."""
    kept = [[number] for number in range(400_000)]
    assert len(kept) == 400_000


def test_young_generations_are_collected_and_the_oldest_is_not() -> None:
    """While they are held no full collection runs, though young ones do."""
    full = FullCollections()
    with full.held():
        before = _collections()
        _make_objects()
        after = _collections()
    assert after[0] > before[0]
    assert after[2] == before[2]


def test_overlapping_holders(thresholds: tuple[int, int, int]) -> None:
    """The threshold comes back when the last of several threads lets go, whatever their order."""
    full = FullCollections()
    full.hold()
    other = threading.Thread(target=full.hold)
    other.start()
    other.join()
    full.let_go()
    assert gc.get_threshold()[2] > thresholds[2]
    full.let_go()
    assert gc.get_threshold() == thresholds


def test_a_threshold_set_meanwhile_stays() -> None:
    """A threshold that the program sets meanwhile is not undone."""
    full = FullCollections()
    with full.held():
        gc.set_threshold(500, 5, 7)
    assert gc.get_threshold() == (500, 5, 7)


_WATCHED = """
import gc, torch
import torch_hybrid_backend.backend
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.eager import EagerEngine, EagerRegion

def state():
    return gc.isenabled(), gc.get_threshold()

seen = {}

def another(gm, example_inputs):
    seen["another backend"] = state()
    return gm

class Region(EagerRegion):
    def __call__(self, inputs):
        seen["first call"] = state()
        return super().__call__(inputs)

class Engine(EagerEngine):
    name = "watching"
    devices: frozenset[str] = frozenset({"cpu"})
    def compile(self, regions, deadline):
        seen["ours"] = state()
        return [Region(region.graph_module) for region in regions]

session.ENGINES = (("watching", lambda config, services: Engine()), *session.ENGINES[-1:])
before = state()
x = torch.ones(3)
with torch.no_grad():
    assert torch.equal(torch.compile(lambda x: x.sin() + 1, backend=another)(x), x.sin() + 1)
    after_another = state()
    assert torch.equal(torch.compile(lambda x: x.cos() + 2, backend="hybrid")(x), x.cos() + 2)
print({**seen, "before": before, "after another": after_another, "after ours": state()})
"""


def test_other_backends_are_left_alone(tmp_path: Path) -> None:
    """With this package imported another backend's compilation finds the collector as the program has it. Ours finds it off, the graph's first
    call without full collections; afterwards all is as before."""
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HYBRID_CACHE_DIR": str(tmp_path / "cache")},
    )
    seen = ast.literal_eval(done.stdout)
    as_before = seen.pop("before")
    on, (young, middle, oldest) = as_before
    assert on
    assert seen.pop("ours")[0] is False
    call_on, (call_young, call_middle, call_oldest) = seen.pop("first call")
    assert (call_on, call_young, call_middle) == (True, young, middle)
    assert call_oldest > oldest
    if hasattr(
        torch._dynamo.utils, "deferred_full_gc"
    ):  # from torch 2.15 on Dynamo holds them back itself, for every backend
        seen["another backend"] = as_before
    assert seen == {"another backend": as_before, "after another": as_before, "after ours": as_before}
