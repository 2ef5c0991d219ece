"""The lowering table: support and refusal as values, decided by lowering itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from loops.check import sample
from loops.interpret import trace
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.ir import Buffer, LoopOp, Map
from torch_hybrid_backend.loops.lowering import Context, lower_node, lowers, supports, table
from torch_hybrid_backend.loops.lowerings import random_numbers, recurrent

aten = torch.ops.aten


def _only_node(fn: Callable[..., object], *inputs: torch.Tensor) -> torch.fx.Node:
    (node,) = (n for n in trace(fn, inputs).graph.nodes if n.op == "call_function")
    return node


def test_second_registration_is_an_error() -> None:
    """An overload has one lowering."""
    assert aten.relu.default in table()
    with pytest.raises(ValueError, match="two lowerings"):
        lowers(aten.relu.default)(lambda ctx, x: x)


@pytest.mark.parametrize(
    ("fn", "x", "code"),
    [
        (aten.lgamma.default, sample(4), Reason.UNKNOWN_OPERATOR),
        (aten.relu.default, sample(0, 4), Reason.ARGUMENT),
        (aten.abs.default, torch.ones(3, dtype=torch.complex64), Reason.DTYPE),
        (lambda x: aten.pow.Tensor_Tensor(x, x), sample(4, dtype=torch.int64), Reason.DTYPE),
    ],
)
def test_refusals_have_codes(fn: Callable[..., object], x: torch.Tensor, code: Reason) -> None:
    """A refusal is a value with a stable code and a sentence."""
    verdict = supports(_only_node(fn, x))
    assert not verdict
    assert verdict.code is code
    assert verdict.why
    assert not verdict.why.endswith(".")


def test_devices_are_no_matter() -> None:
    """Loops are the same wherever tensors live: which devices are served is asked of engines (`partition.capability`)."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, _ = aten.max.dim(x, 0)
        return aten.relu(x), values, aten.zeros([3], device=x.device), aten.arange.start_step(0, 3, 1, device=x.device)

    for device in ("cpu", "cuda:1", "meta"):
        with FakeTensorMode():
            graph = make_fx(fn)(torch.empty(4, device=device)).graph
        verdicts = [supports(node) for node in graph.nodes if node.op == "call_function"]
        assert len(verdicts) == 6
        assert all(verdicts)


def test_symbolic_shapes_are_taken_where_their_form_tells_enough() -> None:
    """Sizes known only at run time are taken; where a lowering needs the number itself, and where sizes depend on data, they are refused."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.relu(x), aten.mean(x), aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]), aten.nonzero(x) + 1

    graph = make_fx(fn, tracing_mode="symbolic")(sample(1, 6, 8)).graph
    verdicts = {n.target: supports(n) for n in graph.nodes if n.op == "call_function"}
    assert verdicts[aten.relu.default]
    assert verdicts[aten.mean.default]
    assert verdicts[aten.im2col.default].code is Reason.SYMBOLIC_SHAPE
    assert verdicts[aten.add.Tensor].code is Reason.SYMBOLIC_SHAPE


def test_sizes_that_only_an_element_needs_are_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering whose elements, not its shape, need the number behind a size is refused when it is asked for, not when it is compiled."""

    def reversed_if_short(ctx: Context, x: Buffer) -> Map:
        return Map(x.shape, x.dtype, lambda index: x.at((x.shape[0] - 1 - index[0] if x.shape[0] < 5 else index[0],)))

    table()
    monkeypatch.setitem(lowering._TABLE, aten.neg.default, reversed_if_short)
    (node,) = (
        n for n in make_fx(aten.neg.default, tracing_mode="symbolic")(sample(6)).graph.nodes if n.op == "call_function"
    )
    assert supports(node).code is Reason.SYMBOLIC_SHAPE
    assert supports(_only_node(aten.neg.default, sample(6)))


def test_parts_of_a_result_are_judged_with_it() -> None:
    """getitem is supported where its producer is; an operator whose empty part is read is refused with all its parts."""
    graph = trace(lambda x: tuple(aten.split.Tensor(x, 2)), [sample(4)]).graph
    assert all(supports(n) for n in graph.nodes if n.op == "call_function")

    def norm(x: torch.Tensor, m: torch.Tensor) -> object:
        return aten._native_batch_norm_legit_no_training.default(x, m, m, m, m, 0.1, 1e-5)

    graph = trace(norm, [sample(1, 2, 3, 3), sample(2, low=1)]).graph
    verdicts = [bool(supports(n)) for n in graph.nodes if n.op == "call_function"]
    assert verdicts == [False, False, False, False]


def test_unread_results_cost_nothing() -> None:
    """Positions of maxima are searched only where the graph reads them."""

    def operations(fn: Callable[..., object]) -> int:
        found: list[LoopOp] = []
        values: dict[torch.fx.Node, object] = {}
        for node in trace(fn, [sample(1, 1, 4, 4)]).graph.nodes:
            if node.op == "placeholder":
                values[node] = Buffer((1, 1, 4, 4), "float32")
            elif node.op == "call_function":
                values[node] = lower_node(Context(found.append), node, values)
        return len(found)

    assert operations(lambda x: aten.max_pool2d_with_indices.default(x, [2, 2])[0]) == 1
    assert operations(lambda x: aten.max_pool2d_with_indices.default(x, [2, 2])) == 2


def test_pointwise_work_is_lazy() -> None:
    """A chain of pointwise operators and views emits no operation of its own."""
    found: list[LoopOp] = []
    values: dict[torch.fx.Node, object] = {}
    for node in trace(lambda x: (x.relu() + 1).t().reshape(2, 6), [sample(4, 3)]).graph.nodes:
        if node.op == "placeholder":
            values[node] = Buffer((4, 3), "float32")
        elif node.op == "call_function":
            values[node] = lower_node(Context(found.append), node, values)
            assert isinstance(values[node], Map)
    assert not found


def test_every_lowering_is_for_a_functional_operator() -> None:
    """No operator of the table changes its arguments, and none draws random numbers but those that kernels draw as eager does."""
    for operator, function in table().items():
        assert not operator._schema.is_mutable, operator
        by_dropout = "attention" in str(operator) or function.__module__ == recurrent.__name__
        if function.__module__ != random_numbers.__name__ and not by_dropout:
            assert torch.Tag.nondeterministic_seeded not in operator.tags, operator
