"""Memory of values when a region is lowered; and that the operations compute what the region does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the operators themselves

from loops.interpret import evaluate, trace
from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.loops.fusion import fuse
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Call,
    ConvOp,
    IntegerMatMulOp,
    MapOp,
    MatMulOp,
    ReduceOp,
    buffers_of,
    domain_vars,
    loads_of,
    parts,
)
from torch_hybrid_backend.partition.regions import partition_graph

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed
Fn = Callable[..., torch.Tensor]


def lowered(fn: Fn, *inputs: torch.Tensor, weights: int = 0, tolerance: float = 1e-4) -> LoopGraph:
    """The loop graph of `fn`, whose results were compared with eager's. The last inputs are weights."""
    module = trace(fn, inputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders[len(placeholders) - weights :]:
        node.meta["constant"] = True
    tensors = {node.name: tensor for node, tensor in zip(placeholders, inputs, strict=True)}
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    graph = lower_region(segment.region, POLICY)
    env = {buffer: tensors[buffer.name] for buffer in graph.inputs}
    for op in graph.ops:
        evaluate(op, env)
    expected = fn(*inputs)
    for own in (
        expected if isinstance(expected, tuple) else (expected,)
    ):  # a region's outputs are in the order of its nodes
        found = [env[buffer] for buffer in graph.outputs if buffer.shape == tuple(own.shape)]
        assert any(torch.allclose(value, own, rtol=tolerance, atol=tolerance) for value in found)
    return graph


@pytest.mark.parametrize(
    ("function", "index", "is_refused"),
    [
        (aten.embedding, [0, 4], False),
        (aten.embedding, [0, 5], True),
        (aten.embedding, [0, -1], True),
        (lambda x, i: aten.index(x, [i]), [-5, 4], False),
        (lambda x, i: aten.index(x, [i]), [-6, 4], True),
        (lambda x, i: aten.index(x, [i * 2]), [1, 3], True),
        (lambda x, i: aten.index(x, [None, i]), [1, 3], True),
        (lambda x, i: aten.index(x, [i]), [1 << 62, 0], True),
        (lambda x, i: aten.index(x, [i]), [-(1 << 63), 0], True),
        (lambda x, i: aten.floor_divide(aten.expand(i, [4, 2]), i), [1, 3], False),
        (lambda x, i: aten.remainder(aten.expand(i, [4, 2]), i), [1, 0], True),
        (lambda x, i: aten.fmod(i, i), [-1, 0], True),
        (lambda x, i: aten.div(7, i, rounding_mode="trunc"), [-1, 0], True),
    ],
)
def test_what_eager_refuses_is_flagged(function: Fn, index: list[int], is_refused: bool) -> None:
    """By one flag for each domain, which nothing else reads: the values are computed all the same."""
    x, at = torch.randn(5, 3), torch.tensor(index)
    module = trace(function, (x, torch.ones_like(at)))
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    graph = lower_region(segment.region, POLICY)
    env = {buffer: {"x_1": x, "i_1": at}.get(buffer.name, at) for buffer in graph.inputs}
    env |= {buffer: x for buffer in graph.inputs if buffer.shape == (5, 3)}
    for op in graph.ops:
        evaluate(op, env)
    (flag,) = graph.flags
    assert bool(env[flag]) is is_refused


def test_refusals_over_one_domain_share_a_flag() -> None:
    """Two tables are read at two tensors of indices of one shape; what is expanded is looked at as it was before."""
    table, at, wide = torch.randn(6, 4), torch.tensor([1, 2, 3]), torch.tensor([[1], [2]])
    graph = lowered(
        lambda t, i, j, k: (t[i] + t[j].sin(), t.gather(0, k.expand(2, 4)).cos()), table, at, at.clone(), wide
    )
    assert sorted(buffer.shape for op in graph.ops if isinstance(op, ReduceOp) for buffer in (op.out,)) == [(), ()]
    assert sorted(op.domain for op in graph.ops if isinstance(op, ReduceOp)) == [(2, 1), (3,)]


def test_positions_that_pytorchs_formulas_compute_need_no_flag() -> None:
    """And positions of a loop that are known to lie inside."""
    table = torch.randn(6, 4)
    assert not lowered(lambda t, i: aten._unsafe_index(t, [i]), table, torch.tensor([0, 5])).flags
    assert not lowered(lambda t: aten.embedding(t, torch.arange(6)), table).flags


def convolution(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return aten.relu(aten.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_concatenations_of_half_types_are_copies(dtype: torch.dtype) -> None:
    """Nothing is rounded anew, however many there are. With a rounding in each, the code of a kernel was several times longer for each."""

    def halves(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for other in others:
            x = shuffled(aten.cat([aten.split(x, 4, 1)[0], other], 1))
        return x

    graph = lowered(halves, *(torch.randn(2, 8 if n == 0 else 4, 3, 5).to(dtype) for n in range(7)))
    copies = [op.value.at(domain_vars(op.out.shape)) for op in graph.ops if isinstance(op, MapOp)]
    assert copies
    assert not any(isinstance(e, Call) and e.op == "round" for e in parts(copies))


def shuffled(x: torch.Tensor) -> torch.Tensor:
    n, c, *side = x.shape
    return aten.clone(x.view(n, 2, c // 2, *side).transpose(1, 2)).reshape(n, c, *side)


def units(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two of ShuffleNetV2's units, and two convolutions of what they return."""
    for _ in range(2):
        left, right = aten.split(x, w.shape[0], 1)
        x = shuffled(aten.cat([left, convolution(right, w, b)], 1))
    return convolution(x, wide, b) - convolution(x, wide, b * 2)


@pytest.mark.parametrize(("batch", "channels", "side"), [(2, 5, (3, 4)), (1, 7, (1, 1)), (3, 1, (5, 2))])
def test_convolutions_keep_their_epilogue_before_a_concatenation(
    batch: int, channels: int, side: tuple[int, int]
) -> None:
    """Bias and ReLU are written with the convolution: what joins and shuffles is a copy, made once for all its readers."""
    x, w = torch.randn(batch, 2 * channels, *side), torch.randn(channels, channels, 1, 1)
    graph = lowered(units, x, w, torch.randn(channels, 2 * channels, 1, 1), torch.randn(channels))
    convolved = {op.out for op in graph.ops if isinstance(op, ConvOp)}
    copies = []
    for op in graph.ops:
        if isinstance(op, MapOp) and len(op.out.shape) == 4:
            index = domain_vars(op.out.shape)
            loads = loads_of(op.value.at(index))
            if any(load.buffer in convolved for load in loads):
                assert all(load.index == index for load in loads if load.buffer in convolved), "no epilogue"
            else:
                copies.append(op)
    # The right half of the second unit's input, and the input of the last two convolutions; the first unit's is a slice. Of two channels
    # a shuffle moves none, so that the right half is what the first unit's convolution wrote, read in place.
    assert len(copies) == (2 if channels == 1 else 3)


@pytest.mark.parametrize(
    ("products", "steps"),
    [(3, 3), *((1, steps) for steps in range(POLICY.max_inline_calls - 8, POLICY.max_inline_calls))],
)
def test_quantized_activations_are_kept_as_integers(products: int, steps: int) -> None:
    """However long the work before them is, and however many products read them: no tensor of floats is dequantized for them."""
    scale, *rest = 0.01, 3, -128, 127, torch.int8

    def layer(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            x = torch.sin(x)
        narrow = quantized.quantize_per_tensor(x, scale, *rest)
        wide = quantized.dequantize_per_tensor(narrow, scale, *rest)
        return aten.cat([aten.mm(wide, weight.to(torch.float32) * 0.02) for weight in weights], 1)

    integers = [torch.randint(-127, 128, (16, 16), dtype=torch.int8) for _ in range(products)]
    graph = lowered(layer, torch.randn(5, 16), *integers, weights=products)
    multiplied = [op for op in graph.ops if isinstance(op, MatMulOp)]
    assert [type(op) for op in multiplied] == [IntegerMatMulOp] * products
    assert len({buffer for op in multiplied for buffer in buffers_of(op.a)}) == 1


def test_dequantized_values_have_readers_of_both_kinds() -> None:
    """Values that integer products read as integers are written as floats as well, for products of floats and for the caller."""
    scale, *rest = 0.5, 0, -128, 127, torch.int8

    def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = quantized.dequantize_per_tensor(quantized.quantize_per_tensor(x, scale, *rest), scale, *rest)
        weight = w.to(torch.float32) * 0.25
        squares = aten.mm(wide, aten.transpose(wide, 0, 1))
        return aten.mm(wide, weight), squares, aten.mm(wide, x), wide, weight

    w = torch.randint(-127, 128, (16, 16), dtype=torch.int8)
    graph = lowered(layer, torch.randn(16, 16), w, weights=1)
    multiplied = [type(op) for op in graph.ops if isinstance(op, MatMulOp)]
    assert sorted(map(str, multiplied)) == sorted(map(str, [IntegerMatMulOp, IntegerMatMulOp, MatMulOp]))


def _shortcut(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of two convolutions with a bias each."""
    first, second = (aten.convolution(x, own, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) for own in (w, v))
    return aten.relu(aten.add(first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_that_another_anchor_reads_are_stored_narrow(dtype: torch.dtype) -> None:
    """The second convolution stores the sum; the first one's epilogue is stored where that has fewer bytes than what it is computed from."""
    torch.manual_seed(0)
    w, v, b = (torch.randn(shape).to(dtype) / 4 for shape in ((32, 16, 1, 1), (32, 16, 1, 1), (32,)))
    inputs = (torch.randn(1, 16, 6, 6).to(dtype), w, v, b)
    graph = lowered(_shortcut, *inputs, weights=3, tolerance=1e-4 if dtype == torch.float32 else 3e-2)
    groups = fuse(graph, POLICY)
    assert [group.kind for group in groups] == ["conv", "conv"]
    between = set(groups[0].reads()) ^ set(groups[1].reads())
    (passed,) = (buffer for buffer in between if groups[0].member_of(buffer))
    assert passed.dtype == str(dtype).removeprefix("torch.")
    assert len(groups[0].members) == (2 if dtype == torch.bfloat16 else 1)


def _normalised(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A layer norm of a product with a bias and a residual."""
    return aten.native_layer_norm(aten.add(aten.addmm(b, x, w), x), [32], None, None, 1e-5)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_that_a_reduction_reads_are_stored_narrow(dtype: torch.dtype) -> None:
    """The product stores its epilogue where that has fewer bytes than its sums; elsewhere the reduction computes it as it reads."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) / 4 for shape in ((40, 32), (32, 32), (32,))]
    graph = lowered(_normalised, *inputs, weights=2, tolerance=1e-4 if dtype == torch.float32 else 3e-2)
    product, rows = fuse(graph, POLICY)
    assert (product.kind, rows.kind) == ("matmul", "row")
    (passed,) = (buffer for buffer in rows.reads() if product.member_of(buffer))
    assert passed.dtype == str(dtype).removeprefix("torch.")
    assert (graph.inputs[0] in rows.reads()) == (dtype == torch.float32)


def test_what_is_larger_than_sums_is_not_stored() -> None:
    """A row that is added to many, and reduced: the sums are read again for each."""
    torch.manual_seed(0)

    def function(x: torch.Tensor, w: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
        return aten.sum(aten.add(aten.mm(x, w).unsqueeze(1), many), [1])

    inputs = [torch.randn(shape).bfloat16() / 4 for shape in ((8, 32), (32, 48), (8, 20, 48))]
    graph = lowered(function, *inputs, tolerance=3e-2)
    assert all(buffer.shape != (8, 20, 48) for op in graph.ops for buffer in op.outs)


def _decode(
    q: torch.Tensor, cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a token's grouped heads over a cache with the token's own key, which is its value too; and that cache."""
    keys = aten.index_put(cache, [None, None, at], new)
    batch, heads, *rest = keys.shape
    each = aten.clone(aten.expand(aten.unsqueeze(keys, 2), [batch, heads, 2, *rest])).view(batch, 2 * heads, *rest)
    return aten.scaled_dot_product_attention(q, each, each), keys


def test_attention_reads_a_cache_and_what_is_new() -> None:
    """No updated cache is written where attention alone reads it, also by several heads; one is where something else does too."""
    tensors = (torch.randn(1, 4, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 1, 8), torch.tensor([5]))
    alone = lowered(lambda *x: _decode(*x)[0], *tensors)
    assert [type(op) for op in alone.ops if op.out not in alone.flags] == [AttentionOp]
    beside = lowered(lambda *x: aten.add(_decode(*x)[0], _decode(*x)[1].sum()), *tensors)
    assert len([op for op in beside.ops if op.out.shape == (1, 2, 16, 8)]) == 1
