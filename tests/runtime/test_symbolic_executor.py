"""A plan for each set of sizes: chosen by the call's inputs, kept while it is used, and the same results at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime import kept_plans
from torch_hybrid_backend.runtime.kept_plans import Sizes
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor

SHAPES = [(4, 6), (7, 2), (4, 2), (1, 1), (4, 6)]


def _graph(function: Callable[..., Any], *inputs: Any) -> PartitionedGraph:
    """The function at any sizes, cut into segments at each sort."""
    traced = make_fx(function, tracing_mode="symbolic")(*inputs)
    traced.graph.eliminate_dead_code()
    return partition_graph(traced, [FakeEngine(refuses=["sort"])], Config()).graph


def _executor(function: Callable[..., Any], *inputs: Any) -> SymbolicExecutor:
    graph = _graph(function, *inputs)
    return SymbolicExecutor(graph, [segment.region.eager for segment in graph.segments])


def _function(x: torch.Tensor) -> tuple[Any, ...]:
    y = torch.sort(x @ x.t())[0]
    return y.t() @ x, x.shape[0] * 2 + x.shape[1], None, y.new_full((x.shape[1], 2), x.shape[0])


def _same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    torch.testing.assert_close(list(found), list(expected), check_stride=True)


def test_each_set_of_sizes_has_its_plan() -> None:
    """Results, sizes among them, are eager's at every size; a set of sizes met again runs the plan that is there."""
    executor = _executor(_function, torch.randn(5, 3))
    assert executor.plans == 0
    for number, shape in enumerate(SHAPES):
        x = torch.randn(shape)
        _same(executor([x]), _function(x))
        assert executor.plans == min(number + 1, 4)


def test_a_timed_call_is_one_of_its_sizes() -> None:
    """A timed call returns what a call returns, and tells the time of each segment."""
    executor = _executor(_function, torch.randn(5, 3))
    for shape in SHAPES:
        x = torch.randn(shape)
        outputs, times = executor.timed([x])
        _same(outputs, _function(x))
        assert [origin.region for time in times for origin in time.origins] == ["r0", "r1", "r2"]


def test_a_plan_can_be_made_before_the_call() -> None:
    """`bind` makes it; the call then finds it."""
    executor = _executor(_function, torch.randn(5, 3))
    x = torch.randn(8, 9)
    executor.bind([x])
    assert executor.plans == 1
    _same(executor([x]), _function(x))
    assert executor.plans == 1


def test_plans_that_were_not_used_for_long_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest by use, not by making; a set of sizes whose plan went gets another one."""
    monkeypatch.setattr(kept_plans, "MAX_PLANS", 2)
    executor = _executor(_function, torch.randn(5, 3))
    made = 0
    plain = executor._made

    def counting(sizes: Sizes) -> Any:
        nonlocal made
        made += 1
        return plain(sizes)

    monkeypatch.setattr(executor, "_made", counting)
    for rows, expected in ((2, 1), (3, 2), (2, 2), (4, 3), (2, 3), (3, 4)):
        x = torch.randn(rows, 3)
        _same(executor([x]), _function(x))
        assert (made, executor.plans <= 2) == (expected, True)


def test_sizes_among_the_inputs() -> None:
    """A size that comes as a number of its own is read as such, though no tensor has it."""

    def function(x: torch.Tensor, count: int) -> tuple[Any, ...]:
        return x.new_zeros(count, 2) + x.sum(), count + 1

    executor = _executor(function, torch.randn(5), 4)
    for rows, count in ((5, 4), (5, 9), (2, 4)):
        x = torch.randn(rows)
        _same(executor([x, count]), function(x, count))
    assert executor.plans == 3


def test_threads_meet_new_sizes_together() -> None:
    """Each gets its own result, and each set of sizes one plan."""
    executor = _executor(_function, torch.randn(5, 3))
    several = [torch.randn(2 + number % 5, 3) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(several, pool.map(lambda x: executor([x]), several), strict=True):
            _same(found, _function(x))
    assert executor.plans == 5


def test_folded_values_serve_every_size() -> None:
    """Values that follow from parameters are folded once for all sizes, and again when the parameter changed."""
    graph = _graph(lambda x, a: (torch.sort(x @ a)[0], a), torch.randn(5, 3), torch.randn(3, 3))
    folds = 0

    def fold(raw: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal folds
        folds += 1
        return [raw[0] * 2]

    hoisted = HoistedInputs((CallInput(1), FoldedValue(0)), (0,))
    executor = SymbolicExecutor(graph, [segment.region.eager for segment in graph.segments], hoisted, fold)
    w = torch.nn.Parameter(torch.randn(3, 3))
    for change in range(2):
        for rows in (2, 4, 2):
            x = torch.randn(rows, 3)
            _same(executor([w, x]), (torch.sort(x @ (w.detach() * 2))[0], w.detach() * 2))
        assert folds == change + 1
        w.data.mul_(3)


def test_sizes_that_no_input_tells_are_refused() -> None:
    """A size that depends on data has no plan ahead of the call: StaticLayoutError, when the executor is made."""
    with pytest.raises(StaticLayoutError, match="cannot be told from the inputs"):
        _executor(lambda x: (torch.nonzero(x) + 1,), torch.ones(3))


def test_a_region_at_impossible_sizes_raises_what_eager_does() -> None:
    """An error of the user's model at one size comes through, and leaves the other sizes alone."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.sort(x)[0][:, 2].sin(),)

    executor = _executor(function, torch.randn(5, 3))
    _same(executor([torch.ones(2, 4)]), function(torch.ones(2, 4)))
    with pytest.raises((IndexError, RuntimeError)):
        executor([torch.ones(2, 1)])
    _same(executor([torch.ones(2, 4)]), function(torch.ones(2, 4)))
