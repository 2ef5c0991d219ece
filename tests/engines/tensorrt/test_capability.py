"""Operators that TensorRT takes, by their forms after torch_tensorrt's lowering, and reasons for the others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.value_ranges import ValueRanges

from tests.engines.tensorrt.regions_for_tests import VERDICTS
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.engines.tensorrt import capability
from torch_hybrid_backend.graph.schema import is_item

pytestmark = pytest.mark.tensorrt

F = torch.nn.functional
aten = torch.ops.aten

X = torch.ones(2, 16, 8, 8)
I = torch.ones(3, dtype=torch.int64)  # noqa: E741


def verdicts(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> dict[str, Verdict]:
    """Verdicts on the operators of a function's graph, by operator."""
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    graph.graph.eliminate_dead_code()
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and not is_item(node)]
    return {str(node.target): capability.supports(node, VERDICTS) for node in nodes}


def last(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> Verdict:
    """The verdict on the last operator of a function's graph."""
    return list(verdicts(function, *inputs, dynamic=dynamic).values())[-1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.silu(x),  # noqa: PLW0108 (tracing counts its arguments)
        lambda x: x.transpose(1, 2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.layer_norm(x, (8, 8)),
        lambda x: F.group_norm(x, 4),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.conv2d(x, x),
        lambda x: x.var(1),
        lambda x: x.argmax(-1),
        lambda x: x > 0,
        lambda x: F.log_softmax(x, -1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_operators_are_judged_by_their_lowered_form(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """The registry has no silu, transpose or pooling with indices, but has their lowered forms."""
    assert all(verdicts(function, X.to(dtype)).values())


@pytest.mark.parametrize(
    ("function", "inputs", "code", "says"),
    [
        (
            lambda x: torch.special.bessel_j0(x + 1),
            [X],
            Reason.UNKNOWN_OPERATOR,
            "converter for aten.special_bessel_j0",
        ),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), [X], Reason.UNKNOWN_OPERATOR, "max_pool2d_with_indices"),
        (lambda x: x.topk(4000)[0], [torch.ones(5000)], Reason.ARGUMENT, "(topk_validator)"),
        (lambda x: x + (1 << 40), [I], Reason.INT64, "whole numbers of 64 bits in 32"),
        (lambda x: torch.where(x > 1, x, -x), [I], Reason.INT64, "whole numbers of 64 bits in 32"),
        (lambda x: x.to(torch.int64), [X], Reason.INT64, "64 bits"),
        (lambda x: x.to(torch.int32), [I], Reason.INT64, "64 bits"),
        (lambda x: x + 1, [X.double()], Reason.FLOAT64, "float64"),
        (lambda x: x.to(torch.float64), [X], Reason.FLOAT64, "float64"),
        (lambda x: x * 2, [torch.ones(0, 3)], Reason.EMPTY, "without elements"),
        (lambda x: x[:, :0].clone(), [X], Reason.EMPTY, "without elements"),
        (lambda x: x.add_(1), [X], Reason.IN_PLACE, "writes into an argument"),
        (lambda x: x + 1, [torch.ones(3, dtype=torch.complex64)], Reason.DTYPE, "complex64"),
        (lambda x: x + 1, [torch.ones(3, dtype=torch.uint8)], Reason.DTYPE, "uint8"),
    ],
)
def test_refusals_have_codes(function: Callable[..., Any], inputs: list[torch.Tensor], code: Reason, says: str) -> None:
    """Each refusal names the operator, the lowered operator, and what is wrong; a converter's refusal names the validator."""
    verdict = last(function, *inputs)
    assert isinstance(verdict, Refused)
    assert verdict.code is code
    assert says in verdict.why


def test_sizes_that_depend_on_data_are_refused() -> None:
    """Refused before torch_tensorrt is asked, which would accept nonzero and tell the size of the result afterwards."""
    verdict = last(lambda x: x.nonzero(), X, dynamic=True)
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.DATA_DEPENDENT


def test_sizes_known_only_at_run_time() -> None:
    """Converters that take no dynamic sizes are distinguished from operators without a converter."""
    assert verdicts(lambda x: F.gelu(x.reshape(x.shape[0], -1)), X, dynamic=True)["aten.gelu.default"]
    from torch_hybrid_backend.engines.tensorrt.adapter import Converters

    node = torch.fx.Graph().call_function(aten.relu.default, ())
    refused = capability.refusal_of(node, Converters(known=2, refusing=("validator",), static_only=True))
    assert refused is not None
    assert refused.code is Reason.SYMBOLIC_SHAPE
    refused = capability.refusal_of(node, Converters(known=1, allocates=True))
    assert refused is not None
    assert refused.code is Reason.DATA_DEPENDENT
    assert capability.refusal_of(node, Converters(known=1)) is None


def test_whole_numbers_of_64_bits_stay_what_they_are() -> None:
    """Indices, positions, moved values, and arithmetic that TensorRT has in int64 are exact. Other operators would cut or round differently."""
    assert all(verdicts(lambda i, w: F.embedding(i, w).relu(), I % 2, torch.ones(4, 5)).values())
    for exact in (
        lambda i: i.reshape(1, 3),
        lambda i: i * 2,
        lambda i: i == 1,
        lambda i: -i,
        lambda i: i.to(torch.float32),
    ):
        assert last(exact, I)
    assert last(lambda x, i: x[i], X, I % 2)
    assert last(lambda x: x.topk(2)[1], X)
    for cut in (lambda i: i // 2, lambda i: i % 2, lambda i: i.to(torch.int32), lambda i: i.sort()[0]):
        verdict = last(cut, I)
        assert isinstance(verdict, Refused)
        assert verdict.code in (Reason.INT64, Reason.ARGUMENT)


def test_attention_of_a_gpu_is_decomposed_with_its_mask() -> None:
    """By default, torch_tensorrt takes any bias of efficient attention for a causal mask."""
    from torch_hybrid_backend.engines.tensorrt import adapter
    from torch_hybrid_backend.engines.tensorrt.fakes import Fakes

    q, bias = torch.ones(2, 4, 8, 16), torch.ones(2, 4, 8, 8)
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("q", "k", "v", "bias")]
    attention = aten._scaled_dot_product_efficient_attention.default
    call = graph.call_function(attention, (*inputs, False))
    graph.output((graph.call_function(operator.getitem, (call, 0)),))
    fakes = Fakes()
    with fakes.mode:
        given = [torch.empty(t.shape) for t in (q, q, q, bias)]
    lowered = adapter.lowered(torch.fx.GraphModule(torch.nn.Module(), graph), fakes, given)
    placeholders = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == 4
    assert placeholders[3].users, "the bias is not used"
    assert attention not in {node.target for node in lowered.graph.nodes}


def test_sizes_are_told_by_any_input_of_a_region() -> None:
    """An operator with a size among its arguments is taken, even if none of its inputs has a dimension of this size."""
    of_sizes: list[Callable[..., Any]] = [
        lambda x: torch.arange(x.shape[0]),
        lambda x: x.reshape(-1)[: x.shape[0]],
        lambda x: torch.full((x.shape[0], 2), 3.0),
        lambda x: x.reshape(x.shape[0] * x.shape[1], -1).view(x.shape[0], -1),
    ]
    for function in of_sizes:
        assert last(function, X, dynamic=True)
    assert last(lambda i: i.cumsum(0), I, dynamic=True)


def test_what_is_known_of_sizes_counts() -> None:
    """A slice up to a size is taken if the size is known not to exceed the dimension."""
    x = next(iter(make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5)).graph.nodes)).meta["val"]
    graph = torch.fx.Graph()
    table, size = graph.placeholder("table"), graph.placeholder("size")
    cut = graph.call_function(aten.slice.Tensor, (table, 0, 0, size))
    with x.fake_mode:
        table.meta["val"] = torch.empty(64, 3)
        cut.meta["val"] = torch.empty(x.shape[0], 3)
    size.meta["val"] = x.shape[0]
    verdict = capability.supports(cut, VERDICTS)
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.SYMBOLIC_SHAPE
    environment = x.fake_mode.shape_env
    environment.var_to_range[x.shape[0].node.expr] &= ValueRanges(2, 64)
    assert capability.supports(cut, VERDICTS)


def test_judging_leaves_the_users_sizes_alone() -> None:
    """Decisions of lowering by the example of a size do not become guards of the user's graph."""
    graph = make_fx(lambda x: F.gelu(x).reshape(x.shape[0], -1), tracing_mode="symbolic")(X)
    x = next(node for node in graph.graph.nodes if node.op == "placeholder").meta["val"]
    environment = x.fake_mode.shape_env
    before = len(environment.guards)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            capability.supports(node, VERDICTS)
    assert len(environment.guards) == before
