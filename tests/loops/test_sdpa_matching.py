"""Attention that a model writes out: what is found, what is not, and that it computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.loops.interpret import evaluate, torch_dtype
from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.policy import POLICY as PROCESSOR_POLICY
from torch_hybrid_backend.engines.triton.policy import POLICY
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region
from torch_hybrid_backend.loops.ir import AttentionOp, IntegerMatMulOp, MapOp, MatMulOp, ReduceOp
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.loops.sdpa_matching import match_sdpa
from torch_hybrid_backend.partition.regions import partition_graph

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)


def _graph(
    fn: Callable[..., object], *inputs: torch.Tensor, policy: FusionPolicy = POLICY
) -> tuple[LoopGraph, list[torch.Tensor]]:
    """The function's operations, and what they take of the inputs."""
    graph = partition_graph(trace(fn, *inputs), [FakeEngine()], Config()).graph
    (segment,) = graph.segments
    taken = [inputs[graph.inputs.index(name)] for name in segment.inputs]
    return lower_region(segment.region, policy), taken


def _results(graph: LoopGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    env = dict(zip(graph.inputs, inputs, strict=True))
    env.update((buffer, tensor.to(torch_dtype(buffer.dtype))) for buffer, tensor in graph.literals)
    for op in graph.ops:
        evaluate(op, env)
    return [env[out] for out in graph.outputs]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Its first rows see nothing: NaN, as softmax has it."""
    scores = q @ k.transpose(-1, -2)
    seen = torch.arange(scores.shape[-1]) < torch.arange(scores.shape[-2])[:, None]
    return torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhsd,bhtd->bhst", q * 0.25, k)
    return torch.einsum("bhst,bhte->bshe", torch.softmax(torch.tanh(scores / 5) * 5 + m, -1, torch.float32), v)


def _shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _plain(q, k[:, :1].repeat_interleave(4, 1), v[:, :1].expand(2, 4, 7, 6))


def _composite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Attention as PyTorch decomposes it where it has no fused kernel: queries and keys are scaled, and rows that see nothing are 0."""
    result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)
    return result


@pytest.mark.parametrize("fn", [_plain, _causal, _capped, _shared, _composite], ids=lambda fn: fn.__name__)
def test_found(fn: Callable[..., torch.Tensor]) -> None:
    """Scaled, masked, capped, by einsum, with heads that share keys: one operation, and what follows it."""
    mask = torch.randn(4, 5, 7)
    mask[:, 2] = -math.inf if fn is _composite else 0
    inputs = (Q, K, V, mask)[: 4 if fn in (_capped, _composite) else 3]
    graph, taken = _graph(fn, *inputs)
    graph = match_sdpa(graph, gathers=True)
    assert sum(isinstance(op, AttentionOp) for op in graph.ops) == 1
    assert not any(isinstance(op, MatMulOp | ReduceOp) for op in graph.ops)
    assert sum(isinstance(op, MapOp) for op in graph.ops) <= 1 + (fn is _causal)  # its result, and a mask: no operands
    (result,) = _results(graph, taken)
    torch.testing.assert_close(result, fn(*inputs), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_found_in_half_precision() -> None:
    """Casts between are no obstacle: what is kept in registers need not be rounded."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)).float(), -1).to(q.dtype) @ v

    inputs = tuple(x.half() for x in (Q, K, V))
    graph, taken = _graph(fn, *inputs)
    graph = match_sdpa(graph, gathers=True)
    assert [type(op) for op in graph.ops if not isinstance(op, MapOp)] == [AttentionOp]
    torch.testing.assert_close(_results(graph, taken)[0], fn(*inputs), rtol=5e-3, atol=5e-3)


def _looked_up(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, place: torch.Tensor
) -> list[torch.Tensor]:
    """The biases are read by another, too: they have memory."""
    bias = table[place] * 2
    hidden = torch.arange(7) > torch.arange(5)[:, None]
    scores = (q @ k.transpose(-1, -2) + bias).masked_fill(hidden, -100.0)
    return [bias, torch.softmax(scores, -1) @ v]


@pytest.mark.parametrize("gathers", [True, False])
def test_masks_that_are_looked_up(gathers: bool) -> None:
    """Kernels that may not gather read what was gathered; cheap masks are computed where they are needed by all."""
    inputs = (Q, K, V, torch.randn(11), torch.randint(11, (5, 7)))
    graph, taken = _graph(_looked_up, *inputs)
    table = graph.inputs[[tensor is inputs[3] for tensor in taken].index(True)]
    graph = match_sdpa(graph, gathers=gathers)
    (attention,) = (op for op in graph.ops if isinstance(op, AttentionOp))
    assert (table in attention.reads()) == gathers
    assert not any(isinstance(op, MatMulOp | ReduceOp) for op in graph.ops)
    torch.testing.assert_close(_results(graph, taken), _looked_up(*inputs), rtol=1e-5, atol=1e-5)


def _weights_read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    return [weights @ v, weights]


def _scores_read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    return (torch.softmax(scores, -1) @ v).sum() + scores.sum()


def _another_axis(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -2) @ v


def _no_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exponentials / exponentials.square().sum(-1, keepdim=True)) @ v


def _moved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).flip(-1), -1) @ v


@pytest.mark.parametrize(
    "fn", [_weights_read, _scores_read, _another_axis, _no_softmax, _moved], ids=lambda fn: fn.__name__
)
def test_not_found(fn: Callable[..., object]) -> None:
    """Attention is not found where values between are read by others, and where it is no softmax over the keys of these scores."""
    graph = match_sdpa(_graph(fn, Q, K, V)[0], gathers=True)
    assert sum(isinstance(op, MatMulOp) for op in graph.ops) == 2
    assert not any(isinstance(op, AttentionOp) for op in graph.ops)


def test_wide_heads_are_left() -> None:
    wide = torch.randn(1, 1, 5, 300)
    graph, _ = _graph(_plain, wide, wide, wide)
    assert not any(isinstance(op, AttentionOp) for op in match_sdpa(graph, gathers=True).ops)


def test_products_of_integers_are_left() -> None:
    """Products of integers are exact, and have a zero point beside their operands."""
    rows, weight = (torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2))

    def fn(rows: torch.Tensor, weight: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch._int_mm(rows, weight.t()) * 1e-4, -1) @ v

    graph, _ = _graph(fn, rows, weight, torch.randn(32, 6), policy=PROCESSOR_POLICY)
    found = match_sdpa(graph, gathers=True)
    (first,) = (op for op in graph.ops if isinstance(op, IntegerMatMulOp))
    assert first in found.ops
    assert not any(isinstance(op, AttentionOp) for op in found.ops)
