"""The kernels of groups around products, convolutions and attention, as the loops language has them."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.codegen.anchors import Anchor, arguments, neutral_kernel, over
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.attention_scores import SdpaScore
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import AttentionOp, Buffer, ConvOp, Load, LoopOp, MapOp, MatMulOp
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, ConvKernel, MatMulKernel, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous


def buffer(*shape: int, name: str = "") -> Buffer:
    return Buffer(shape, "float32", name)


def anchor_of(op: LoopOp, *reads: Buffer, layouts: dict[Buffer, Layout] | None = None) -> Anchor:
    """out = op + bias, and its sum with what the group keeps to itself."""
    out, bias, inside = op.out, buffer(op.out.shape[-1], name="bias"), buffer(*op.out.shape, name="inside")
    domain = tuple(LoopVar(f"d{d}", n) for d, n in enumerate(out.shape))
    point = tuple(map(index_of, domain))
    accumulator = buffer(*out.shape, name="accumulator")
    value = ops.add(accumulator.at(point), bias.at(point[-1:]))
    stores = (Store(out, point, ops.add(value, inside.at(point))),)
    found = {b: contiguous(b.shape) for b in (*reads, bias, out, inside)} | (layouts or {})
    return Anchor(
        op, domain, accumulator, (Argument(out, found[out]),), stores, found, frozenset({inside, accumulator})
    )


@pytest.mark.parametrize("batches", [1, 3])
def test_products(batches: int) -> None:
    """a over (b, m, k), b over (b, k, n); one right operand for all batches is read at 0."""
    a, b = buffer(3, 4, 5, name="a"), buffer(batches, 5, 6, name="b")
    anchor = anchor_of(MatMulOp(buffer(3, 4, 6), a, b), a, b)
    kernel = neutral_kernel(anchor)
    assert isinstance(kernel, MatMulKernel)
    assert [argument.buffer.name for argument in kernel.reads] == ["a", "b", "bias"]
    batch, m, n = anchor.point
    k = index_of(kernel.k)
    assert isinstance(kernel.a, Load)
    assert isinstance(kernel.b, Load)
    assert kernel.k.extent == 5
    assert kernel.a.index == (batch, m, k)
    assert kernel.b.index == (as_index(0) if batches == 1 else batch, k, n)
    assert (kernel.writes, kernel.stores, kernel.accumulator) == (anchor.writes, anchor.stores, anchor.accumulator)


def test_convolutions() -> None:
    """Input and weight over variables of their own; layouts are the graph's."""
    x, w = buffer(1, 4, 9, 9, name="x"), buffer(6, 2, 3, 3, name="w")
    op = ConvOp(buffer(1, 6, 4, 4), x, w, (2, 2), (0, 0), (1, 1), 2)
    kernel = neutral_kernel(anchor_of(op, x, w, layouts={x: Blocked(4)}))
    assert isinstance(kernel, ConvKernel)
    assert isinstance(kernel.w, Load)
    assert [v.extent for v in kernel.x_vars] == [1, 4, 9, 9]
    assert kernel.w.index == tuple(map(index_of, kernel.w_vars))
    assert (kernel.stride, kernel.padding, kernel.dilation, kernel.groups) == ((2, 2), (0, 0), (1, 1), 2)
    assert [(a.buffer.name, a.layout) for a in kernel.reads[:2]] == [("x", Blocked(4)), ("w", contiguous(w.shape))]


@pytest.mark.parametrize("masked", [True, False])
def test_attention(masked: bool) -> None:
    """A mask is one more operand."""
    q, k, v = (buffer(1, 2, 4, 8, name=name) for name in "qkv")
    mask = buffer(1, 2, 4, 4, name="mask") if masked else None
    score = SdpaScore(scale=0.25, causal=True, mask=mask)
    op = AttentionOp(buffer(1, 2, 4, 8), q=q, k=k, v=v, score=score)
    kernel = neutral_kernel(anchor_of(op, q, k, v, *([mask] if mask else [])))
    assert isinstance(kernel, AttentionKernel)
    assert [a.buffer.name for a in kernel.reads] == ["q", "k", "v", *(["mask"] if masked else []), "bias"]
    assert ((kernel.score is not None), len(kernel.score_vars)) == (masked, 4)
    assert (kernel.scale, kernel.causal) == (0.25, True)
    assert len({variable.name for part in (kernel.q_vars, kernel.k_vars, kernel.v_vars) for variable in part}) == 12


def test_what_is_no_anchor() -> None:
    """The error names the operation's class."""
    x = buffer(4)
    with pytest.raises(TypeError, match="a MapOp cannot anchor a kernel"):
        neutral_kernel(anchor_of(MapOp(buffer(4), x), x))


def test_arguments() -> None:
    """Whole operands first, then what is loaded, each once; neither what lies inside the kernel nor what has no layout."""
    x, y, inside, foreign = (buffer(4, name=name) for name in ("x", "y", "inside", "foreign"))
    (_, load_x), (_, load_y) = over(x, "i"), over(y, "j")
    expr = ops.add(ops.add(load_x, load_x), ops.add(over(inside, "i")[1], over(foreign, "i")[1]))
    layouts = {b: contiguous(b.shape) for b in (x, y, inside)}
    assert [a.buffer for a in arguments([load_y, expr], [x], frozenset({inside}), layouts)] == [x, y]
