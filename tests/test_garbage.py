"""The collector, held back while graphs are compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from torch_hybrid_backend import garbage
from torch_hybrid_backend.garbage import FullCollections


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
    """What the program sets itself is not undone."""
    full = FullCollections()
    with full.held():
        gc.set_threshold(500, 5, 7)
    assert gc.get_threshold() == (500, 5, 7)


def test_dynamo_holds_them(thresholds: tuple[int, int, int]) -> None:
    """A compilation by any backend holds them from its first step to its last, also where it fails."""
    torch._dynamo.reset()
    garbage.hold_while_dynamo_compiles()
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(gc.get_threshold()[2])
        if len(seen) == 2:
            raise RuntimeError("on purpose")
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert seen[0] > thresholds[2]
    assert gc.get_threshold() == thresholds
    with pytest.raises(Exception, match="on purpose"):
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(3))
    assert gc.get_threshold() == thresholds
    torch._dynamo.reset()
