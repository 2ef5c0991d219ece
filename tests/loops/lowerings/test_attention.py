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
from torch_hybrid_backend.capture.fixes.attention_states import drop_attention_states
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.ir import Buffer, LoopOp
from torch_hybrid_backend.loops.lowering import Context, lower_node, supports
from torch_hybrid_backend.loops.policy import COMMON, Abilities

TRAINING = Abilities(attention_gradients=True)
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
    """Eager's operator runs where the graph reads the log-sum-exp (training)."""
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
@pytest.mark.parametrize("wanted", ["log-sum-exp", "dropout", "state"])
def test_what_operators_of_cuda_do_besides_is_refused(operator: str, wanted: str) -> None:
    """The log-sum-exp where the engine writes none; dropout and the state of random numbers in any case."""
    attention, mask = CUDA[operator]
    q = sample(1, 2, 4, 8)
    dropout = 0.5 if wanted == "dropout" else 0.0
    fetched = {"log-sum-exp": slice(0, 2), "dropout": slice(0, 1), "state": slice(2, None)}[wanted]
    graph = _traced_on_cuda(lambda q: attention(q, q, q, *mask, dropout)[fetched], q).graph
    (node,) = (n for n in graph.nodes if n.target is attention)
    verdict = supports(node, COMMON if wanted == "log-sum-exp" else TRAINING)
    assert not verdict
    assert verdict.code in (Reason.ARGUMENT, Reason.DTYPE)


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)])
def test_flash_attention_of_cuda_aligns_its_mask_at_the_end(lengths: tuple[int, int]) -> None:
    """Causal with more keys than queries: its last query sees the last key. With fewer: its first rows see nothing, and are 0."""
    q, k = sample(1, 2, lengths[0], 8), sample(1, 2, lengths[1], 8)
    attention, _ = CUDA["flash"]
    (result,) = run_graph(_traced_on_cuda(lambda q, k: attention(q, k, k, 0.0, True)[0], q, k), (q, k))
    seen = torch.arange(lengths[1]) <= torch.arange(lengths[0])[:, None] + (lengths[1] - lengths[0])
    torch.testing.assert_close(result, torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=seen))


# Training

_BACKWARD = {
    "flash": lambda g, q, k, v, r, bias, causal: aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, r[0], r[1], r[2], r[3], q.shape[2], k.shape[2], 0.0, causal, r[6], r[7]
    ),
    "efficient": lambda g, q, k, v, r, bias, causal: aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, bias, r[0], r[1], r[2], r[3], 0.0, [True, True, True, False], causal
    )[:3],
    "cudnn": lambda g, q, k, v, r, bias, causal: aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, r[0], r[1], r[6], r[7], bias, r[2], r[3], q.shape[2], k.shape[2], 0.0, causal
    ),
}


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    result: torch.Tensor = aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal)[0]
    return result


@pytest.mark.parametrize("operator", CUDA)
@pytest.mark.parametrize(("key_heads", "causal", "with_bias"), [(4, True, False), (2, False, True), (1, True, False)])
def test_training_on_cuda(operator: str, key_heads: int, causal: bool, with_bias: bool) -> None:
    """Result, log-sum-exp in the operator's own form, and gradients, of heads that may share keys; the state of random numbers is not read."""
    with_bias = with_bias and operator != "flash"
    key_heads = 4 if operator == "efficient" else key_heads  # it shares no keys
    q, g = sample(2, 4, 5, 8), sample(2, 4, 5, 6, seed=1)
    k, v = sample(2, key_heads, 5, 8, seed=2), sample(2, key_heads, 5, 6, seed=3)
    if operator == "flash":  # its result has the queries' width
        g, v = sample(2, 4, 5, 8, seed=1), sample(2, key_heads, 5, 8, seed=3)
    bias = sample(2, 1, 5, 5) if with_bias else None
    forward, _ = CUDA[operator]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *bias: torch.Tensor) -> list[object]:
        own = bias[0] if bias else None
        # The number of arguments before `dropout_p` differs.
        results = forward(q, k, v, 0.0, causal) if operator == "flash" else forward(q, k, v, own, True, 0.0, causal)
        return [results[0], results[1], *_BACKWARD[operator](g, q, k, v, results, own, causal)]

    inputs = (q, k, v, g) if bias is None else (q, k, v, g, bias)
    graph_module = _traced_on_cuda(step, *inputs)
    drop_attention_states(graph_module)
    graph = graph_module.graph
    states = graph.find_nodes(op="call_function", target=aten.empty.memory_format)
    assert len(states) == 2
    with graph.inserting_before(next(iter(graph.nodes))):
        for state in states:  # eager makes them: to the engine they are inputs
            given = graph.placeholder(state.name)
            given.meta["val"] = state.meta["val"]
            state.replace_all_uses_with(given)
    graph.eliminate_dead_code()
    unread = [torch.zeros(2, dtype=torch.int64)] * 2
    out, log_sum_exp, *gradients = run_graph(graph_module, (*unread, *inputs), TRAINING)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = _math(*leaves, None if bias is None else bias.double(), causal)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients, torch.autograd.grad(exact, leaves, g.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    scores = q @ k.repeat_interleave(4 // key_heads, 1).transpose(-1, -2) / math.sqrt(8)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf) if causal else scores
    want = {"flash": (2, 4, 5), "efficient": (2, 4, 32), "cudnn": (2, 4, 5, 1)}[operator]
    assert log_sum_exp.shape == want
    torch.testing.assert_close(log_sum_exp.flatten(2)[..., :5], scores.logsumexp(-1))
    assert bool((log_sum_exp.flatten(2)[..., 5:] == math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_training_on_the_cpu(dtype: torch.dtype) -> None:
    """The CPU's operators, with a mask under which a row sees nothing: its log-sum-exp is the operator's own, and its gradients are 0."""
    q, k, v, g = (sample(2, 3, n, 8, dtype=dtype, seed=seed) for seed, n in enumerate((5, 7, 7, 5)))
    mask = sample(1, 1, 5, 7, dtype=dtype)
    mask[..., 1, :] = -math.inf

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, mask: torch.Tensor) -> list[object]:
        out, log_sum_exp = flash(q, k, v, attn_mask=mask)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return [out, log_sum_exp, *backward(g, q, k, v, out, log_sum_exp, 0.0, False, attn_mask=mask)]

    inputs = (q, k, v, g, mask)
    tolerance = 2e-2 if dtype is torch.float16 else 1e-5
    for got, want in zip(run_graph(trace(step, inputs), inputs, TRAINING), step(*inputs), strict=True):
        assert isinstance(want, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, check_stride=False)


def test_gradients_that_eager_computes() -> None:
    """Eager computes the gradient of a bias, gradients with dropout, and all where the engine has no kernels for them."""
    q, bias = sample(1, 2, 4, 8), sample(1, 2, 4, 4)

    def step(dropout: float, of_bias: bool) -> Callable[..., object]:
        def run(q: torch.Tensor, bias: torch.Tensor) -> object:
            r = aten._scaled_dot_product_efficient_attention(q, q, q, bias, True)
            backward = aten._scaled_dot_product_efficient_attention_backward
            return backward(q, q, q, q, bias, r[0], r[1], r[2], r[3], dropout, [True, True, True, of_bias])

        return run

    for dropout, of_bias, abilities in ((0.5, False, TRAINING), (0.0, True, TRAINING), (0.0, False, COMMON)):
        graph = _traced_on_cuda(step(dropout, of_bias), q, bias).graph
        (node,) = (n for n in graph.nodes if "backward" in str(n.target))
        verdict = supports(node, abilities)
        assert not verdict
        assert verdict.code is Reason.ARGUMENT
