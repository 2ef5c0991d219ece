"""Order that wires do not show: mutation, aliasing, random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.partition.dependencies import Dependencies, dependencies

aten = torch.ops.aten


def _position(needs: Dependencies, target: object) -> int:
    return next(i for i, node in enumerate(needs.operators) if node.target is target)


def test_a_write_waits_for_readers_through_views() -> None:
    """copy_ to an input runs after an operator that reads a view of that input."""

    def update(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        read = aten.sin.default(aten.slice.Tensor(cache, 0, 0, 2))
        made = aten.cos.default(x)
        aten.copy_.default(cache, made)
        return read

    needs = dependencies(trace(update, torch.zeros(4), torch.zeros(4)).graph)
    copy, sin = _position(needs, aten.copy_.default), _position(needs, aten.sin.default)
    assert sin in needs.before[copy]
    assert needs.ordered[copy]
    assert not needs.ordered[sin]


def test_a_later_reader_waits_for_the_write() -> None:
    """A read of the memory after the write, through a view taken before it, sees what was written."""

    def update(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        view = aten.view.default(cache, [2, 2])
        aten.copy_.default(cache, x)
        return aten.sin.default(view)

    needs = dependencies(trace(update, torch.zeros(4), torch.zeros(4)).graph)
    assert _position(needs, aten.copy_.default) in needs.before[_position(needs, aten.sin.default)]


def test_unsafe_view_shares_memory_though_its_schema_hides_it() -> None:
    """A write to the base waits for a reader of its _unsafe_view."""

    def update(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        read = aten.sin.default(aten._unsafe_view.default(cache, [4]))
        aten.copy_.default(cache, x)
        return read

    needs = dependencies(trace(update, torch.zeros(2, 2), torch.zeros(2, 2)).graph)
    assert _position(needs, aten.sin.default) in needs.before[_position(needs, aten.copy_.default)]


def test_random_operators_keep_their_order() -> None:
    """Two independent draws stay in order, so that a seed means the same as in eager."""

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.bernoulli.default(x), aten.rand_like.default(x)

    needs = dependencies(trace(draw, torch.zeros(4)).graph)
    first, second = _position(needs, aten.bernoulli.default), _position(needs, aten.rand_like.default)
    assert first in needs.before[second]


def test_pure_operators_depend_on_their_inputs_alone() -> None:
    """Readers of one value do not wait for each other."""
    needs = dependencies(trace(lambda x: (x.sin(), x.cos(), x.exp()), torch.zeros(4)).graph)
    assert needs.before == ((), (), ())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_keep_their_order() -> None:
    """Collectives that do not depend on each other, and the waits for them, run in the graph's order."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        started = [c10d.all_reduce(value, "sum", "0") for value in (x.sin(), x)]
        return tuple(c10d.wait_tensor(value) for value in started)

    c10d = torch.ops._c10d_functional
    needs = dependencies(trace(program, torch.zeros(4)).graph)
    ordered = [i for i, is_ordered in enumerate(needs.ordered) if is_ordered]
    assert len(ordered) == 4
    assert all(before in needs.before[after] for before, after in itertools.pairwise(ordered))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_readers_of_what_a_collective_wrote_wait() -> None:
    """A read of a collective's memory after the wait, without a wire from it, runs after it."""

    def program(x: torch.Tensor) -> torch.Tensor:
        reduced = c10d.all_reduce(x, "sum", "0")
        view = aten.view.default(reduced, [2, 2])
        c10d.wait_tensor(reduced)
        return aten.sin.default(view)

    c10d = torch.ops._c10d_functional
    needs = dependencies(trace(program, torch.zeros(4)).graph)
    wait = _position(needs, c10d.wait_tensor.default)
    assert wait in needs.before[_position(needs, aten.sin.default)]
    assert _position(needs, aten.view.default) in needs.before[wait]
