"""Control flow: operators that call sub-graphs, branches and sizes that depend on data. Right either way; compiled where it can be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan

import torch_hybrid_backend
from tests.end_to_end import models
from torch_hybrid_backend.core.plan import Plan

Program = Callable[..., Any]
_GENERATOR = torch.Generator().manual_seed(0)
_WEIGHT = torch.randn(16, 16, generator=_GENERATOR) / 4


def rows(count: int, offset: float = 0.0) -> torch.Tensor:
    """(count, 16) float32, the same for one count."""
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count)) + offset


@pytest.fixture(autouse=True)
def strict(settings: pytest.MonkeyPatch) -> None:
    """A region that fails raises instead of hiding behind eager."""
    settings.setenv("HYBRID_STRICT", "1")


@pytest.fixture
def captured() -> Iterator[None]:
    """Dynamo captures scalars and sizes that depend on data, as unbacked symbols, instead of breaking the graph."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def check(program: Program, calls: Sequence[tuple[Any, ...]], **options: Any) -> None:
    """Check that one compilation of `program` gives eager's values for each of the argument lists, twice."""
    fast = torch.compile(program, backend="hybrid", **options)
    with torch.no_grad():
        for arguments in [call for call in calls for _ in range(2)]:
            torch.testing.assert_close(fast(*arguments), program(*arguments), rtol=1e-4, atol=1e-5)


def plans_of(program: Program, *arguments: Any) -> dict[str, Plan]:
    """The plans of one call under no_grad, by the name of their graph."""
    with torch.no_grad():
        return {plan.graph: plan for plan in torch_hybrid_backend.explain(program, *arguments).plans}


def engines(plan: Plan) -> set[str]:
    return {region.engine for region in plan.regions}


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.relu(x @ _WEIGHT) + 1, lambda x: torch.sigmoid(x) * x, (x,))


def nested_branches(x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 2, lambda x: torch.tanh(x @ _WEIGHT), lambda x: x.exp() - 1, (x,))

    return torch.relu(torch.cond(x.sum() > 0, inner, lambda x: x.sin() * 2, (x * 0.5,))) + x


def several_results(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ _WEIGHT)
    a, b = torch.cond(y.mean() > 0.4, lambda y: (y.sin(), y.t() * 2), lambda y: (y.cos(), y.t() + 3), (y,))
    return torch.softmax(a, -1) + b.t()


def loop(steps: torch.Tensor, x: torch.Tensor) -> Any:
    def again(i: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return i < steps

    return while_loop(again, lambda i, x: (i + 1, torch.tanh(x @ _WEIGHT) * 0.9 + 0.1), (torch.tensor(0), x))


def mapped(x: torch.Tensor) -> torch.Tensor:
    return map_rows(lambda row: torch.relu(row @ _WEIGHT) + row, x) * 2


def recurrence(x: torch.Tensor) -> Any:
    def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(carried @ _WEIGHT + row)
        return state, state * 2

    return scan(step, torch.zeros(16), x)


def backward_recurrence(x: torch.Tensor) -> Any:
    return scan(lambda carried, row: (carried * 0.5 + row, carried + 0.0), torch.ones(16), x, reverse=True)


def prefix_sums(x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, torch.relu(x), dim=0, combine_mode="generic") * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (branch, [(rows(6, 2.0),), (rows(6, -2.0),)]),
        (nested_branches, [(rows(6, 2.0),), (rows(6, 1.0) * 0.1,), (rows(6, -2.0),)]),
        (several_results, [(rows(6, 2.0),), (rows(6, -2.0),)]),
        (loop, [(torch.tensor(n), rows(5)) for n in (3, 0, 1, 20)]),
        (mapped, [(rows(5),)]),
        (recurrence, [(rows(5),)]),
        (backward_recurrence, [(rows(5),)]),
        (prefix_sums, [(rows(5),)]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_values(program: Program, calls: Sequence[tuple[Any, ...]], dynamic: bool) -> None:
    """Each operator of control flow gives eager's values, whichever branch is taken and however often a loop runs."""
    check(program, calls, dynamic=dynamic)


def test_bodies_are_compiled() -> None:
    """Branches, conditions, loop bodies and steps are graphs of their own, run by the engine."""
    expected = {
        (branch, rows(6, 2.0)): {"branch", "branch.true_graph_0"},
        (branch, rows(6, -2.0)): {"branch", "branch.false_graph_0"},
        (mapped, rows(5)): {"mapped", "mapped.body_graph_0"},
        (recurrence, rows(5)): {"recurrence", "recurrence.scan_combine_graph_0"},
    }
    for (program, x), names in expected.items():
        plans = plans_of(program, x)
        assert set(plans) == names
        assert all(engines(plan) == {"tvm"} for name, plan in plans.items() if name != program.__name__)
    plans = plans_of(loop, torch.tensor(3), rows(5))
    assert engines(plans["loop.while_loop_body_graph_0"]) == {"tvm"}
    assert "loop.while_loop_cond_graph_0" in plans
    plans = plans_of(nested_branches, rows(6, 2.0))
    assert engines(plans["nested_branches.true_graph_0.true_graph_0"]) == {"tvm"}


def test_operator_is_refused_with_its_reason() -> None:
    """explain() says that eager runs the operator itself, and why."""
    (node,) = (node for node in plans_of(branch, rows(6))["branch"].nodes if node.operator == "cond")
    assert node.engine == "eager"
    assert "sub-graphs" in node.refusals[0].why


class Gated(nn.Module):
    """A perceptron or a linear layer, as the input says; and a loop over one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.small = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, self.large, self.small, (x,))
        _, z = while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, self.small(z).tanh()), (torch.tensor(0), y))
        return y + z


def test_weights_in_bodies_are_live() -> None:
    """Weights read by branches and loop bodies may change between calls, as all weights may."""
    model = Gated().eval()
    fast = torch.compile(model, backend="hybrid", dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            for x in (rows(6, 2.0), rows(6, -2.0)):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            for parameter in model.parameters():
                parameter.mul_(1.25)
            model.small.bias.data = torch.ones(16)


def _gradients(program: Program, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(program(x, weight)) if leaf.is_floating_point()]
    loss = sum(((leaf * leaf).sum() for leaf in leaves), torch.zeros(()))
    return list(torch.autograd.grad(loss, (x, weight)))


def _branch_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x, w: torch.relu(x @ w) + 1, lambda x, w: torch.sigmoid(x) * w[0], (x, w))


def _map_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return map_rows(lambda row, w: torch.tanh(row @ w), x, w)


def _scan_of(x: torch.Tensor, w: torch.Tensor) -> Any:
    def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(carried @ w + row)
        return state, state * 2

    return scan(step, torch.zeros(16), x)


def _loop_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, torch.tanh(x @ w)), (torch.tensor(0), x))[1]


@pytest.mark.usefixtures("captured")  # torch's backward of while_loop reads its number of steps
@pytest.mark.parametrize("offset", [2.0, -2.0])
@pytest.mark.parametrize("program", [_branch_of, _map_of, _scan_of, _loop_of], ids=lambda program: program.__name__)
def test_gradients(program: Program, offset: float) -> None:
    """Gradients through control flow, to inputs and to closed-over weights, equal eager's."""
    x = rows(6, offset)
    fast = torch.compile(program, backend="hybrid", dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(_gradients(fast, x, _WEIGHT), _gradients(program, x, _WEIGHT), rtol=1e-4, atol=1e-4)


def python_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ _WEIGHT) if x.sum() > 0 else x * 2 + 1


def number_from_data(x: torch.Tensor) -> torch.Tensor:
    n = int(x.sum().item())
    return x * n + torch.relu(x)


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0).float() * 2 + 1


def masked(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ _WEIGHT) * 2
    return torch.sigmoid(y[y > 0.5]) + 1


def masked_rows(x: torch.Tensor) -> torch.Tensor:
    kept = torch.relu(x @ _WEIGHT)[x[:, 0] > 0]
    return torch.softmax(kept @ _WEIGHT, -1).sum(0) + x.mean(0)


def distinct(x: torch.Tensor) -> torch.Tensor:
    values, counts = torch.unique((x * 2).round(), return_counts=True)
    return values * counts + 1


def split_by_data(x: torch.Tensor) -> torch.Tensor:
    sizes = (x[0] > 0).sum().item(), (x[0] <= 0).sum().item()
    for size in sizes:
        torch._check(size >= 0)
    left, right = (torch.relu(x) * 3).split([int(size) for size in sizes], dim=1)
    return left.sum(1) + right.mean(1)


def prefix(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    n = count.item()
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return torch.relu(x[:n] @ _WEIGHT).sum(0) + x.mean(0)


def ramp(count: torch.Tensor) -> torch.Tensor:
    n = count.item()
    torch._check(n >= 2)
    return torch.arange(n, dtype=torch.float32).sin() * 2 + torch.ones(int(n))


def repeated(x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x * 2, (x[:, 0].abs() * 2).long(), dim=0).cos() + 1


_DATA_DEPENDENT = [
    (number_from_data, [(rows(6),), (rows(6, 1.0),)]),
    (positions, [(rows(6),), (rows(6, -9.0),), (rows(6, 9.0),)]),
    (masked, [(rows(6),), (rows(6) * 0,), (rows(6, 1.0),)]),
    (masked_rows, [(rows(6),), (rows(6, -9.0),), (rows(6, 9.0),)]),
    (distinct, [(rows(6),), (rows(6, 1.0),)]),
    (prefix, [(rows(6), torch.tensor(n)) for n in (3, 0, 1, 6)]),
    (ramp, [(torch.tensor(n),) for n in (5, 2, 40)]),
    (repeated, [(rows(6),), (rows(6, 1.0),)]),
]


@pytest.mark.parametrize(
    ("program", "calls"),
    [
        (python_branch, [(rows(6, 2.0),), (rows(6, -2.0),)]),
        (split_by_data, [(rows(6),), (rows(6, 1.0),)]),
        *_DATA_DEPENDENT,
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_graph_breaks(program: Program, calls: Sequence[tuple[Any, ...]]) -> None:
    """Branches, numbers and sizes that depend on data break the graph; the pieces give eager's values."""
    check(program, calls)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("program", "calls"), _DATA_DEPENDENT, ids=lambda value: value.__name__ if callable(value) else ""
)
def test_unbacked_sizes(program: Program, calls: Sequence[tuple[Any, ...]]) -> None:
    """Captured whole, the same programs hold sizes that nobody knows before the call: those parts run in eager, at any size."""
    check(program, calls, fullgraph=True)


@pytest.mark.usefixtures("captured")
def test_static_part_of_an_unbacked_graph_is_compiled() -> None:
    """Around sizes that depend on data, what has a fixed size runs on the engine."""
    (plan,) = plans_of(masked_rows, rows(6)).values()
    engine_of = {node.operator: node.engine for node in plan.nodes}
    assert engine_of["aten.relu.default"] == "tvm"
    assert engine_of["aten.add.Tensor"] == "tvm"
    assert engine_of["aten.index.Tensor"] == "eager"


@pytest.mark.usefixtures("captured")
def test_failed_check_raises() -> None:
    """An assertion about data by `torch._check` is kept in the compiled program."""
    fast = torch.compile(prefix, backend="hybrid", fullgraph=True)
    with torch.no_grad():
        fast(rows(6), torch.tensor(2))
        with pytest.raises(RuntimeError):
            fast(rows(6), torch.tensor(7))


def test_faulty_body_runs_in_eager(settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A body that the wiring cannot compile is run by eager with one warning; under strict it raises."""
    from torch_hybrid_backend.driver import prepared
    from torch_hybrid_backend.errors import PassError

    original = prepared.run_passes

    def failing(gm: torch.fx.GraphModule, *arguments: Any) -> torch.fx.GraphModule:
        if any(node.target is torch.ops.aten.sigmoid.default for node in gm.graph.nodes):
            raise PassError("a pass failed")
        return original(gm, *arguments)

    settings.setattr(prepared, "run_passes", failing)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a pass failed"):
        torch.compile(branch, backend="hybrid")(rows(6, 2.0))
    torch._dynamo.reset()
    settings.setenv("HYBRID_STRICT", "0")
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        check(branch, [(rows(6, 2.0),), (rows(6, -2.0),)])
    (record,) = caplog.records
    assert "false_graph_0" in record.message


def test_model_with_early_exit() -> None:
    """A classifier that stops at its first head where that is sure enough: a graph break in Python, each part compiled."""
    model = models.perceptron()
    head = nn.Linear(40, 9)

    def classify(x: torch.Tensor) -> torch.Tensor:
        early = torch.softmax(head(x), -1)
        return early if early.max() > 0.9 else torch.softmax(model(x), -1)

    check(classify, [(models.rows(),), (models.rows() * 30,)])


def test_flex_attention() -> None:
    """flex_attention, whose score function is mapped over the scores, gives eager's values."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q * 2, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e9)) + 1

    q, k, v = (torch.randn(1, 2, 32, 16, generator=_GENERATOR) for _ in range(3))
    with contextlib.suppress(UserWarning):
        check(attend, [(q, k, v)])
