"""The matmul family against eager."""

from __future__ import annotations

import math

import pytest
import torch

from loops.check import FLOATS, check, sample
from loops.interpret import trace
from torch_hybrid_backend.loops.ir import Buffer, LoopOp, MatMulOp
from torch_hybrid_backend.loops.lowering import Context, lower_node

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_products(dtype: torch.dtype) -> None:
    """Matrices, batches of them, vectors, and their sums with biases."""
    a, b = sample(5, 7, dtype=dtype, low=-1, high=1), sample(7, 3, dtype=dtype, low=-1, high=1)
    batch_a, batch_b = sample(2, 5, 7, dtype=dtype, low=-1, high=1), sample(2, 7, 3, dtype=dtype, low=-1, high=1)
    check(aten.mm.default, a, b)
    check(aten.bmm.default, batch_a, batch_b)
    check(aten.mv.default, a, b[:, 0].clone())
    check(aten.dot.default, a[0].clone(), b[:, 0].clone())
    check(aten.addmm.default, sample(3, dtype=dtype), a, b)
    check(lambda c, a, b: aten.addmm.default(c, a, b, beta=2, alpha=3), sample(5, 1, dtype=dtype), a, b)
    check(aten.baddbmm.default, sample(2, 1, 3, dtype=dtype), batch_a, batch_b)
    check(aten.addmv.default, sample(5, dtype=dtype), a, b[:, 0].clone())
    check(aten.addbmm.default, sample(5, 3, dtype=dtype), batch_a, batch_b)


def test_bias_times_zero_is_not_read() -> None:
    """beta=0 ignores the bias, NaN included."""
    c = torch.full((5, 3), math.nan)
    check(lambda c, a, b: aten.addmm.default(c, a, b, beta=0), c, sample(5, 7), sample(7, 3))
    check(lambda c, a, b: aten.baddbmm.default(c, a, b, beta=0, alpha=0.5), c, sample(2, 5, 7), sample(2, 7, 3))


def test_transposed_weights() -> None:
    """x @ w.t() and products of views."""
    check(lambda x, w: aten.mm.default(x, w.t()), sample(5, 7), sample(3, 7))
    check(lambda x, w: aten.bmm.default(x, w.transpose(1, 2)), sample(2, 5, 7), sample(2, 3, 7))
    check(lambda x: aten.mm.default(x.view(4, 3), x.view(3, 4)), sample(12))


def _operations(fn: object, *inputs: torch.Tensor) -> list[LoopOp]:
    operations: list[LoopOp] = []
    values: dict[torch.fx.Node, object] = {}
    for node in trace(fn, inputs).graph.nodes:
        if node.op == "placeholder":
            values[node] = Buffer(tuple(node.meta["val"].shape), "float32")
        elif node.op == "call_function":
            values[node] = lower_node(Context(operations.append), node, values)
    return operations


def test_expanded_matrix_stays_one_matrix() -> None:
    """A matrix expanded over the batch is passed once, not per batch."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return aten.bmm.default(x, w.expand(2, 7, 3))

    inputs = sample(2, 5, 7), sample(7, 3)
    check(fn, *inputs)
    (product,) = (op for op in _operations(fn, *inputs) if isinstance(op, MatMulOp))
    assert product.b.shape == (1, 7, 3)


def test_batched_matrices_stay_batched() -> None:
    """A view of different matrices is not mistaken for an expanded one."""
    check(lambda x, w: aten.bmm.default(x, w.transpose(1, 2)), sample(2, 5, 7), sample(2, 3, 7))
    check(
        lambda x, w: aten.bmm.default(x, w + aten.arange.default(2, device=torch.device("cpu"))[:, None, None]),
        sample(2, 5, 7),
        sample(7, 3),
    )


def test_linear() -> None:
    """linear with and without bias, any leading dimensions."""
    linear = aten.linear.default
    graph = torch.fx.Graph()
    for shape in ((7,), (4, 7), (2, 3, 7)):
        x, w, b = sample(*shape), sample(5, 7), sample(5)
        nodes = [graph.placeholder(f"x{n}") for n in range(3)]
        node = graph.call_function(linear, tuple(nodes))
        node.meta["val"] = linear(x, w, b)
        for n, t in zip(nodes, (x, w, b), strict=True):
            n.meta["val"] = t
        buffers = {n: Buffer(tuple(t.shape), "float32") for n, t in zip(nodes, (x, w, b), strict=True)}
        value = lower_node(Context(lambda op: None), node, buffers)
        assert value.shape == tuple(node.meta["val"].shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_8_bits(dtype: torch.dtype) -> None:
    """torch's product with int8 rows, each of which has a scale."""
    q = sample(11, 16, dtype=torch.int8, low=-128, high=127)
    check(aten._weight_int8pack_mm.default, sample(3, 16, dtype=dtype), q, sample(11, dtype=dtype).abs())
