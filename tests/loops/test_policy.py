"""Each limit of a fusion policy decides, where it stands alone, what is fused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.loops.fusion import fuse
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region
from torch_hybrid_backend.loops.ir import AttentionOp, ConvOp, Map, MapOp, ReduceOp, ScanOp
from torch_hybrid_backend.loops.lowering import Refuse
from torch_hybrid_backend.loops.policy import Abilities, FusionPolicy
from torch_hybrid_backend.partition.regions import partition_graph

aten = torch.ops.aten
GENEROUS = FusionPolicy(
    max_inline_calls=1000,
    max_inline_loads=1000,
    max_members=1000,
    max_reads=1000,
    min_rows=1,
    small_elements=0,
    channel_block=1,
)


def _graph(fn: Callable[..., torch.Tensor], policy: FusionPolicy, *inputs: torch.Tensor) -> LoopGraph:
    (segment,) = partition_graph(trace(fn, *inputs), [FakeEngine()], Config()).graph.segments
    return lower_region(segment.region, policy)


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = aten.tanh.default(aten.exp.default(x))
    return x


def _sum(*inputs: torch.Tensor) -> torch.Tensor:
    total = inputs[0]
    for other in inputs[1:]:
        total = aten.add.Tensor(total, other)
    return total


@pytest.mark.parametrize(
    ("fn", "count", "limits"),
    [(_chain, 1, {"max_inline_calls": 5}), (_sum, 6, {"max_inline_loads": 3})],
    ids=["calls", "loads"],
)
def test_long_expressions_get_memory(fn: Callable[..., torch.Tensor], count: int, limits: dict[str, int]) -> None:
    """A value with more operations, or more loads, than the limit is an operation of its own."""
    inputs = [torch.randn(3, 5) for _ in range(count)]
    assert len(_graph(fn, GENEROUS, *inputs).ops) == 1
    assert len(_graph(fn, dataclasses.replace(GENEROUS, **limits), *inputs).ops) > 1


@pytest.mark.parametrize("limits", [{"max_members": 1}, {"max_reads": 1}])
def test_groups_are_limited(limits: dict[str, int]) -> None:
    """In how many operations they have, and in how many buffers they read."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return aten.sum.dim_IntList(aten.mul.Tensor(aten.softmax.int(x, -1), y), [1])

    graph = _graph(fn, GENEROUS, torch.randn(9, 5), torch.randn(9, 5))
    assert len(fuse(graph, GENEROUS)) == 1
    assert len(fuse(graph, dataclasses.replace(GENEROUS, **limits))) > 1


@pytest.mark.parametrize(
    ("limits", "joins"),
    [({"min_rows": 4}, True), ({"min_rows": 5}, False), ({"min_rows": 5, "small_elements": 24}, True)],
)
def test_rows_join_where_they_are_many_or_small(limits: dict[str, int], joins: bool) -> None:
    """Four rows of six: what is computed from a sum of each joins it for that many rows, or that few elements."""
    policy = dataclasses.replace(GENEROUS, **limits)
    graph = _graph(lambda x: aten.div.Tensor(x, aten.sum.dim_IntList(x, [1], True)), policy, torch.randn(4, 6))
    assert len(fuse(graph, policy)) == (1 if joins else 2)


@pytest.mark.parametrize(("block", "in_place"), [(4, True), (8, False)])
def test_channels_are_read_in_place_from_whole_blocks(block: int, in_place: bool) -> None:
    """The second convolution reads the channels from the fourth on of what the first one writes."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def convolution(x: torch.Tensor) -> torch.Tensor:
            return aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

        return convolution(aten.slice.Tensor(convolution(x), 1, 4, 8))

    policy = dataclasses.replace(GENEROUS, channel_block=block)
    graph = _graph(fn, policy, torch.randn(1, 4, 5, 5), torch.randn(8, 4, 1, 1))
    second = [op for op in graph.ops if isinstance(op, ConvOp)][-1]
    assert isinstance(second.x, Map) == in_place


def test_scans_are_operations_of_their_own() -> None:
    """With kernels for them a running sum is one operation that reads each element once; what is computed of every element joins it."""
    x = torch.randn(4, 30)
    (op,) = _graph(lambda x: aten.cumsum.default(x, 1), GENEROUS, x).ops
    assert isinstance(op, ReduceOp)
    scanning = dataclasses.replace(GENEROUS, abilities=Abilities(scans=True))
    (op,) = _graph(lambda x: aten.cumsum.default(x, 1), scanning, x).ops
    assert isinstance(op, ScanOp)
    graph = _graph(lambda x: aten.exp.default(aten.cumsum.default(aten.tanh.default(x), 1)), scanning, x)
    (group,) = fuse(graph, scanning)
    assert [member.role for member in group.members] == ["scan", "full"]


@pytest.mark.parametrize(("gathers", "operations"), [(True, 1), (False, 3)])
def test_attention_reads_what_is_picked_and_computes_its_mask(gathers: bool, operations: int) -> None:
    """Keys picked by an index, and a mask from positions: read and computed in attention, or given memory first."""

    def fn(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        keys = aten.index_select.default(cache, 2, table)
        seen = aten.le.Tensor(torch.arange(6), aten.unsqueeze.default(position, 1))
        mask = aten.where.self(seen, torch.zeros(()), torch.full((), -math.inf))
        first = aten._scaled_dot_product_flash_attention_for_cpu.default(q, keys, keys, attn_mask=mask)[0]
        return aten._scaled_dot_product_flash_attention_for_cpu.default(first, keys, keys, attn_mask=mask)[0]

    policy = dataclasses.replace(GENEROUS, gathers_in_attention=gathers)
    inputs = (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.arange(6), torch.arange(3))
    ops = _graph(fn, policy, *inputs).ops
    assert len([op for op in ops if isinstance(op, AttentionOp)]) == 2
    assert len(ops) == 1 + operations


def test_a_mask_that_is_dear_gets_memory() -> None:
    """A mask that is dear is computed once for all that read it, whatever the policy says of cheap ones."""

    def fn(q: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        mask = _chain(_chain(distances))
        first = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, attn_mask=mask)[0]
        return aten._scaled_dot_product_flash_attention_for_cpu.default(first, q, q, attn_mask=mask)[0]

    policy = dataclasses.replace(GENEROUS, gathers_in_attention=True)
    ops = _graph(fn, policy, torch.randn(1, 2, 5, 8), torch.randn(5, 5)).ops
    assert [type(op) for op in ops] == [MapOp, AttentionOp, AttentionOp]


@pytest.mark.parametrize("takes", [True, False])
def test_attention_writes_its_log_sum_exp(takes: bool) -> None:
    """The log-sum-exp is written where that is read and the policy takes it; else the operator is refused."""
    policy = dataclasses.replace(GENEROUS, abilities=Abilities(attention_gradients=takes))

    def fn(q: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)[1]

    if not takes:
        with pytest.raises(Refuse, match="log-sum-exp"):
            _graph(fn, policy, torch.randn(1, 2, 5, 8))
        return
    (op,) = (op for op in _graph(fn, policy, torch.randn(1, 2, 5, 8)).ops if isinstance(op, AttentionOp))
    assert op.outs == (op.out, op.log_sum_exp)
