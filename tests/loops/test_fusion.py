"""Fusion: which operations become one kernel, and that the kernels together compute what the region does.

`fused` runs the groups as kernels would: point by point, what a member made held at the point, never read back from memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from loops.interpret import Environment, Frame, evaluate, torch_dtype, trace
from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.loops.fusion import (
    Group,
    fuse,
    inlined,
    needed_outside,
    replace_loads,
)
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region
from torch_hybrid_backend.loops.index import contiguous_strides, linear, var
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Expr,
    Load,
    LoopOp,
    Map,
    MapOp,
    ReduceOp,
    loads_of,
    parts,
    scalar_index,
)
from torch_hybrid_backend.loops.ops import add, call
from torch_hybrid_backend.partition.regions import partition_graph

aten = torch.ops.aten
_COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "any": torch.any}


class _Points(Frame):
    """A group's domain; `held` is what its members computed at every point."""

    def __init__(self, shape: tuple[int, ...], env: Environment) -> None:
        super().__init__(shape, env)
        self.held: dict[Buffer, torch.Tensor] = {}

    def _load(self, e: Load, mask: torch.Tensor | None) -> torch.Tensor:
        return self.held[e.buffer] if e.buffer in self.held else super()._load(e, mask)


def _run(group: Group, env: Environment) -> None:
    """Fills the buffers of a group's members."""
    points = _Points(group.shape, env)
    written: Environment = {}
    for member in group.members:
        out = member.op.out
        if group.accumulator is not None and member is group.members[0]:
            evaluate(member.op, env)  # the anchor
            points.held[group.accumulator] = env.pop(out)
        value = points.expr(member.expr, None).expand(group.shape)
        if isinstance(member.op, ReduceOp):
            value = _COMBINE[member.op.combiner](value, dim=group.axes, keepdim=True)
        points.held[out] = value
        place = points.evaluate_index(linear(member.index, contiguous_strides(out.shape)), None)
        places = place.expand(group.shape).reshape(-1)
        assert places.unique().numel() == math.prod(out.shape), "an element is not written"
        written[out] = torch.empty(out.shape, dtype=torch_dtype(out.dtype))
        written[out].view(-1)[places] = value.expand(group.shape).reshape(-1).to(written[out].dtype)
    env.update(written)


def _graph(fn: Callable[..., object], *inputs: torch.Tensor) -> tuple[LoopGraph, Environment]:
    module = trace(fn, inputs)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    (segment,) = partition_graph(module, [FakeEngine()], Config(min_region_nodes=1)).graph.segments
    graph = lower_region(segment.region, POLICY)
    tensors = dict(zip(names, inputs, strict=True))
    return graph, {buffer: tensors[buffer.name] for buffer in graph.inputs} | dict(graph.literals)


def fused(fn: Callable[..., object], *inputs: torch.Tensor) -> list[Group]:
    """The groups of `fn`, which were run, and gave what eager gives."""
    graph, env = _graph(fn, *inputs)
    groups = fuse(graph, POLICY)
    members = [member.op for group in groups for member in group.members]
    assert sorted(map(id, members)) == sorted(map(id, graph.ops))
    for group in groups:
        assert all(buffer in env for buffer in group.reads()), "a kernel runs before what it reads is there"
        _run(group, env)
    results = fn(*inputs)
    expected = list(results) if isinstance(results, tuple) else [results]
    torch.testing.assert_close([env[buffer] for buffer in graph.outputs], expected, rtol=1e-4, atol=1e-4)
    return groups


X, W, B = torch.randn(12, 8), torch.randn(8, 10), torch.randn(10)
IMAGES, FILTERS = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
ROWS = torch.randint(0, 6, (5,))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.sin(), (8,)) + 1


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + b)


def _transposed_too(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    return y, y.t().contiguous(), (y.t() + 1).contiguous()


def _convolved(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.relu(torch.conv2d(x, w))
    return y, y.mean((2, 3))


def _two_axes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(0), x.sum(1)


def _one_axis_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(1), x.amax(1), x + 1


def _neighbours(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    return y, y.flip(0) + y


def _looked_up(rows: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wanted = 5 - rows
    return wanted.float(), table[wanted]


def _between_products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ x
    z = y @ x
    return y.relu(), z.relu()


def _joined(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.cat([x, x.sin()], 1).softmax(-1),)


@pytest.mark.parametrize(
    ("fn", "inputs", "expected"),
    [
        (_softmax, (X,), [("row", 3)]),
        (_norm, (X,), [("row", 4)]),
        (_linear, (X, W, B), [("matmul", 2)]),
        (_transposed_too, (X,), [("map", 3)]),
        (_convolved, (IMAGES, FILTERS), [("conv", 2), ("row", 2)]),
        (_two_axes, (X,), [("row", 1), ("row", 1)]),
        (_one_axis_twice, (X,), [("row", 3)]),
        (_neighbours, (X,), [("map", 1), ("map", 1)]),
        (_looked_up, (ROWS, X[0]), [("map", 2), ("row", 2)]),
        (_between_products, (X[:8],), [("matmul", 1), ("map", 1), ("matmul", 2)]),
        (_joined, (X,), [("row", 3)]),
    ],
)
def test_groups_compute_what_the_region_does(
    fn: Callable[..., object], inputs: tuple[torch.Tensor, ...], expected: list[tuple[str, int]]
) -> None:
    """Run as kernels, the groups give eager's results. What fits one pass is one kernel: an epilogue follows its product, statistics
    and what is made of them share their rows, a transposed copy is written along. Sums along two axes, readers of another element than
    the one at hand or of an element whose number is just being computed are kernels of their own."""
    groups = fused(fn, *inputs)
    assert [(group.kind, len(group.members)) for group in groups] == expected


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (POLICY.min_rows - 1, POLICY.small_elements),
        (POLICY.min_rows, POLICY.small_elements),
        (2, POLICY.small_elements // 2),
    ],
)
def test_few_long_rows_keep_all_cores_busy(rows: int, columns: int) -> None:
    """Elementwise operations join the sum of their row, before it or behind, where there are rows enough for all cores, or so
    little work that a second kernel costs more."""

    def before(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, y.sum(-1)

    def behind(x: torch.Tensor) -> torch.Tensor:
        return x - x.sum(-1, keepdim=True)

    x = torch.randn(rows, columns)
    joins = rows >= POLICY.min_rows or rows * columns <= POLICY.small_elements
    assert [group.kind for group in fused(before, x)] == (["row"] if joins else ["map", "row"])
    assert [group.kind for group in fused(behind, x)] == (["row"] if joins else ["row", "map"])


def _maps(edges: list[tuple[int, ...]], inputs: int) -> LoopGraph:
    """Operation k sums the buffers `edges[k]`, counted from the inputs on."""
    buffers = [Buffer((4,), "float32", f"x{k}") for k in range(inputs)]
    ops: list[LoopOp] = []
    for sources in edges:
        read = [buffers[k] for k in sources]

        def total(index, read=read):
            result: Expr = read[0].at(index)
            for buffer in read[1:]:
                result = add(result, buffer.at(index))
            return result

        value = Map((4,), "float32", total, tuple((buffer, lambda index: index) for buffer in read))
        buffers.append(Buffer((4,), "float32", f"y{len(ops)}"))
        ops.append(MapOp(buffers[-1], value))
    return LoopGraph(tuple(buffers[:inputs]), tuple(buffers[-1:]), (), tuple(ops))


def test_kernels_are_bounded() -> None:
    """A long chain becomes several kernels, and one that would read many tensors is split: the compiler's time is bounded."""
    chain = fuse(_maps([(k,) for k in range(2 * POLICY.max_members + 1)], 1), POLICY)
    assert [len(group.members) for group in chain] == [POLICY.max_members, POLICY.max_members, 1]
    wide = fuse(_maps([(0, 1), *((15 + k, k + 1) for k in range(1, 15))], 16), POLICY)
    assert len(wide) == 2
    assert all(len(group.reads()) <= POLICY.max_reads for group in wide)


def test_nothing_moves_past_its_readers() -> None:
    """A group that another kernel reads from takes no more members: it would have to run after its own reader."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        z = y @ y  # reads y from memory
        return y.cos() + z, z.relu()

    groups = fused(fn, X[:8, :8])
    for earlier, later in itertools.combinations(groups, 2):
        made = {id(member.op.out) for member in later.members}
        assert not any(id(buffer) in made for buffer in earlier.reads())


def test_inlined_values_read_nothing_of_the_group() -> None:
    """Each member's value is written over what comes from outside; a shared part stays shared."""
    (group,) = fuse(_maps([(0, 1), (2, 2), (3, 0)], 2), POLICY)
    first, second, third = inlined(group).values()
    assert {load.buffer.name for load in loads_of(third)} == {"x0", "x1"}
    assert first in set(parts([second]))
    assert second in set(parts([third]))


def test_replacing_loads_keeps_indices() -> None:
    """A load inside an index is an address, not a value: it stays; nothing is copied where nothing is replaced."""
    rows, table = Buffer((4,), "int64", "rows"), Buffer((9,), "float32", "table")
    i = var("i", 4)
    read = table.at((scalar_index(rows.at((i,)), 0, 8),))
    expr = call("neg", read)
    assert replace_loads(expr, lambda load: None) is expr
    kept = replace_loads(expr, lambda load: table.at((i,)) if load.buffer is rows else None)
    assert kept is expr
    changed = replace_loads(expr, lambda load: rows.at((i,)) if load.buffer is table else None)
    assert {load.buffer.name for load in loads_of(changed)} == {"rows"}


def test_only_what_others_read_needs_memory() -> None:
    """A result that its own group alone reads is needed nowhere; inputs, the region's outputs and what other kernels read are."""
    graph = _maps([(0,), (1,)], 1)
    assert len(needed_outside(fuse(graph, POLICY), graph.outputs)) == 2
    assert len(needed_outside(fuse(graph, POLICY), [op.out for op in graph.ops])) == 3
    chain = _maps([(k,) for k in range(POLICY.max_members + 1)], 1)
    assert len(needed_outside(fuse(chain, POLICY), chain.outputs)) == 3
