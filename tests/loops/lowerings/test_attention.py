"""Attention against eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from loops.check import FLOATS, check, sample
from loops.interpret import evaluate, run_graph, trace
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.loops.ir import Buffer, LoopOp
from torch_hybrid_backend.loops.lowering import Context, lower_node, supports

aten = torch.ops.aten
flash = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(dtype: torch.dtype, causal: bool) -> None:
    """Queries and keys of different lengths, causal or not, with a given scale."""
    q, k, v = (sample(2, 3, n, 8, dtype=dtype, seed=n) for n in (5, 7, 7))
    check(lambda q, k, v: flash(q, k, v, 0.0, causal)[0], q, k, v)
    check(lambda q, k, v: flash(q, k, v, 0.0, causal, scale=0.3)[0], q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_masks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Additive masks broadcast; a row that sees nothing is 0."""
    q, k, v = (sample(2, 3, n, 8, dtype=dtype, seed=n) for n in (5, 7, 7))
    mask = sample(*shape, dtype=dtype)
    mask[..., 2:4] = -math.inf
    mask[..., 0, :] = -math.inf if shape[-2] > 1 else 0
    check(lambda q, k, v, m: flash(q, k, v, attn_mask=m)[0], q, k, v, mask)


def test_bool_mask_through_the_composite() -> None:
    """F.scaled_dot_product_attention with a bool mask traces to operators that are all taken."""
    q, k, v = (sample(2, 3, n, 8, seed=n) for n in (5, 7, 7))
    mask = sample(2, 1, 5, 7, dtype=torch.bool)
    mask[..., 0] = True
    check(torch.nn.functional.scaled_dot_product_attention, q, k, v, mask)


def test_log_sum_exp_is_refused() -> None:
    """Where the graph reads the log-sum-exp (training), eager's operator runs."""
    q = sample(1, 2, 4, 8)
    graph = trace(lambda q: flash(q, q, q), [q]).graph
    (node,) = (n for n in graph.nodes if n.target is flash)
    verdict = supports(node)
    assert not verdict
    assert verdict.code is Reason.ARGUMENT


@pytest.mark.parametrize(
    ("shapes", "arguments"),
    [
        (((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)), {"enable_gqa": True}),
        (((5, 8), (7, 8), (7, 8)), {"scale": 0.2}),
        (((3, 5, 8), (3, 7, 8), (3, 7, 8)), {"is_causal": True}),
        (((2, 2, 2, 5, 8), (2, 2, 2, 7, 8), (2, 2, 2, 7, 8)), {}),
    ],
)
def test_composite_attention(shapes: tuple[tuple[int, ...], ...], arguments: dict[str, object]) -> None:
    """The undecomposed operator: grouped heads, and any number of leading dimensions."""
    target = aten.scaled_dot_product_attention.default
    graph = torch.fx.Graph()
    tensors = [sample(*shape, seed=n) for n, shape in enumerate(shapes)]
    nodes = [graph.placeholder(f"x{n}") for n in range(3)]
    node = graph.call_function(target, tuple(nodes), arguments)
    expected = node.meta["val"] = target(*tensors, **arguments)
    buffers = {n: Buffer(tuple(t.shape), "float32") for n, t in zip(nodes, tensors, strict=True)}
    env = dict(zip(buffers.values(), tensors, strict=True))
    operations: list[LoopOp] = []
    context = Context(operations.append)
    result = context.materialize(lower_node(context, node, buffers))
    for op in operations:
        evaluate(op, env)
    torch.testing.assert_close(env[result], expected)


CUDA = {
    "flash": (aten._scaled_dot_product_flash_attention.default, ()),
    "efficient": (aten._scaled_dot_product_efficient_attention.default, (None, False)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (None, False)),
}


def _traced_on_cuda(fn: Callable[..., object], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The function's graph on a GPU that need not be there."""
    with FakeTensorMode():
        graph_module = make_fx(fn)(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs))
    graph_module.graph.eliminate_dead_code()
    return graph_module


@pytest.mark.parametrize("operator", CUDA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_operators_of_cuda(operator: str, dtype: torch.dtype, causal: bool) -> None:
    """CUDA's attention is the CPU's: its fake graph, lowered and run by the interpreter, gives what the CPU's operator computes."""
    attention, mask = CUDA[operator]
    q, k, v = (sample(2, 3, 5, 8, dtype=dtype, seed=n) for n in range(3))
    graph_module = _traced_on_cuda(lambda q, k, v: attention(q, k, v, *mask, 0.0, causal, scale=0.3)[0], q, k, v)
    (result,) = run_graph(graph_module, (q, k, v))
    tolerance = 4e-3 if dtype is torch.float16 else 2e-5
    torch.testing.assert_close(result, flash(q, k, v, 0.0, causal, scale=0.3)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("operator", ["efficient", "cudnn"])
def test_operators_of_cuda_with_a_mask(operator: str) -> None:
    """A bias broadcast over heads; more keys than queries, the first of which sees the first key alone where it is causal."""
    attention, _ = CUDA[operator]
    q, k, v = (sample(2, 3, n, 8, seed=n) for n in (5, 7, 7))
    bias = sample(2, 1, 5, 7)
    masked = _traced_on_cuda(lambda q, k, v, b: attention(q, k, v, b, False)[0], q, k, v, bias)
    (result,) = run_graph(masked, (q, k, v, bias))
    torch.testing.assert_close(result, flash(q, k, v, attn_mask=bias)[0], rtol=2e-5, atol=2e-5)
    causal = _traced_on_cuda(lambda q, k, v: attention(q, k, v, None, False, 0.0, True)[0], q, k, v)
    (result,) = run_graph(causal, (q, k, v))
    torch.testing.assert_close(result, flash(q, k, v, 0.0, True)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("operator", CUDA)
@pytest.mark.parametrize("wanted", ["log-sum-exp", "dropout"])
def test_what_operators_of_cuda_do_besides_is_refused(operator: str, wanted: str) -> None:
    """The log-sum-exp that training reads, and dropout, stay with PyTorch's operator."""
    attention, mask = CUDA[operator]
    q = sample(1, 2, 4, 8)
    dropout = 0.5 if wanted == "dropout" else 0.0
    fetched = 2 if wanted == "log-sum-exp" else 1
    graph = _traced_on_cuda(lambda q: attention(q, q, q, *mask, dropout)[:fetched], q).graph
    (node,) = (n for n in graph.nodes if n.target is attention)
    verdict = supports(node)
    assert not verdict
    assert verdict.code is Reason.ARGUMENT


def test_flash_attention_of_cuda_aligns_its_mask_at_the_end() -> None:
    """Causal with more keys than queries: its last query sees the last key, which is another function, and refused."""
    q, k = sample(1, 2, 4, 8), sample(1, 2, 6, 8)
    attention, _ = CUDA["flash"]
    graph = _traced_on_cuda(lambda q, k: attention(q, k, k, 0.0, True)[0], q, k).graph
    (node,) = (n for n in graph.nodes if n.target is attention)
    assert supports(node) == Refused(
        Reason.ARGUMENT, "flash attention is causal, and has more keys than queries, or fewer"
    )
