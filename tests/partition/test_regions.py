"""Partitioning: who gets which operator, in how many regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.core.verdict import Reason, Verdict
from torch_hybrid_backend.errors import RegionError
from torch_hybrid_backend.partition import levels
from torch_hybrid_backend.partition.regions import Partition, partition_graph

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _partition(
    function: Callable[..., object], *inputs: torch.Tensor, engines: Sequence[Engine], config: Config | None = None
) -> Partition:
    return partition_graph(trace(function, *inputs), engines, config or Config())


def _reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def _run(graph: PartitionedGraph, inputs: Sequence[torch.Tensor]) -> list[object]:
    """Execute the segments in order, each from what it declares to read."""
    values: dict[str, object] = dict(zip(graph.inputs, inputs, strict=True))
    for segment in graph.segments:
        results = segment.region.graph_module(*(values[name] for name in segment.inputs))
        values.update(zip(segment.outputs, results, strict=True))
    return [values[item] if isinstance(item, str) else item for item in graph.outputs]


def _engines(found: Partition) -> list[str]:
    return [segment.engine_hint for segment in found.graph.segments]


def test_calls_of_control_flow_are_segments_of_their_own() -> None:
    """With what takes their results, apart from other operators that eager runs and from each other."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = x.sum() > 0
        y = torch.cond(p, torch.sin, torch.cos, (x,))
        return torch.cond(p, torch.cos, torch.sin, (y,)) + 1, torch.cond(p, torch.sin, torch.tan, (x,)) + y

    found: list[Partition] = []

    def compile_graph(captured: CapturedGraph) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        found.append(partition_graph(captured.graph_module, [], Config()))
        return lambda inputs: list(captured.graph_module(*inputs))

    with torch.no_grad():
        torch.compile(function, backend=lambda gm, inputs: capture(gm, inputs, compile_graph, ()))(torch.ones(4))
    (partition,) = found
    called = [
        [str(node.target) for node in segment.region.graph_module.graph.nodes if node.op == "call_function"]
        for segment in partition.graph.segments
    ]
    assert sorted(map(len, called)) == [2, 2, 2, 2, 2]
    assert [names for names in called if "cond" in names] == [["cond", "<built-in function getitem>"]] * 3


def test_a_graph_an_engine_takes_whole_is_one_region() -> None:
    """Views, several outputs and operators with several results included."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, indices = aten.max.dim(x, 1)
        return values.sin(), indices, x.t().reshape(-1) * 2

    found = _partition(function, torch.randn(3, 4), engines=[FakeEngine()])
    assert _engines(found) == ["fake"]
    x = torch.randn(3, 4)
    assert all(map(torch.equal, _run(found.graph, [x]), function(x)))


def test_no_engine_leaves_one_eager_segment() -> None:
    """Everything eager is one segment, without candidates."""
    found = _partition(lambda x: x.sin().cos(), torch.randn(3), engines=[])
    assert _engines(found) == ["eager"]
    assert found.candidates(found.graph.segments[0], ["fake"]) == ()


def test_regions_stay_convex_around_an_unsupported_operator() -> None:
    """relu -> sort -> add(relu): the two supported operators cannot be one region, for sort lies between."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (torch.sort(y)[0] + y) @ w

    found = _partition(function, torch.randn(4, 4), torch.randn(4, 4), engines=[FakeEngine(refuses=["sort"])])
    assert _engines(found) == ["fake", "eager", "fake"]
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(_run(found.graph, [x, w])[0], function(x, w))  # type: ignore[arg-type]


def test_engines_claim_in_order_and_others_stay_candidates() -> None:
    """The first engine that takes an operator claims it; one that takes the whole region as well is a candidate."""
    first, second = FakeEngine("first", takes=["mm"]), FakeEngine("second")
    found = _partition(lambda x: (x @ x).sin(), torch.randn(4, 4), engines=[first, second])
    assert _engines(found) == ["first", "second"]
    assert found.candidates(found.graph.segments[0], ["first", "second", "eager"]) == ("first", "second")
    assert found.candidates(found.graph.segments[1], ["first", "second", "eager"]) == ("second",)


def test_every_refusal_is_recorded_with_its_code() -> None:
    """Node by node and engine by engine, with the engine's own sentence."""
    found = _partition(lambda x: torch.sort(x @ x)[0], torch.randn(4, 4), engines=[FakeEngine(refuses=["sort"])])
    by_operator = {node.operator: node for node in found.nodes}
    refusal = by_operator["aten.sort.default"].refusals[0]
    assert (refusal.engine, refusal.code, refusal.why) == (
        "fake",
        Reason.UNKNOWN_OPERATOR,
        "aten.sort.default has no lowering",
    )
    assert by_operator["getitem"].engine == "eager"
    assert by_operator["aten.mm.default"].refusals == ()
    assert by_operator["aten.mm.default"].flops == 2 * 4**3


def test_each_engine_is_asked_once_per_operator() -> None:
    """However often the graph is cut."""
    engine = FakeEngine(refuses=["sort", "exp"])
    _partition(lambda x: torch.sort(x.sin().exp().cos())[0].sin(), torch.randn(4), engines=[engine])
    assert len(engine.asked) == len(set(engine.asked))


def test_an_island_of_cheap_operators_between_eager_ones_from_python_stays_eager() -> None:
    """A pointwise operator is not worth splitting eager in two where each part costs a call of Python; the refusal says TOO_SMALL."""
    engine = FakeEngine(refuses=["histc"])
    found = _partition(lambda x: torch.histc(torch.histc(x, 4).sin(), 4), torch.randn(4), engines=[engine])
    assert _engines(found) == ["eager"]
    sin = next(node for node in found.nodes if node.operator == "aten.sin.default")
    assert [refusal.code for refusal in sin.refusals] == [Reason.TOO_SMALL]


def test_an_island_between_operators_that_the_plan_calls_is_a_region() -> None:
    """Nothing is lost by splitting eager where the plan calls its operators without Python: `sort`, but not `histc`."""
    engine = FakeEngine(refuses=["sort", "histc"])
    both = _partition(lambda x: torch.sort(torch.sort(x)[0].sin())[0], torch.randn(4), engines=[engine])
    assert _engines(both) == ["eager", "fake", "eager"]
    one = _partition(lambda x: torch.sort(torch.histc(x, 4).sin())[0], torch.randn(4), engines=[engine])
    assert _engines(one) == ["eager", "fake", "eager"]


def test_a_product_between_eager_operators_is_worth_a_region() -> None:
    """A matrix product alone may be faster elsewhere by far."""
    engine = FakeEngine(refuses=["sort"])
    found = _partition(lambda x: torch.sort(torch.sort(x)[0] @ x)[0], torch.randn(4, 4), engines=[engine])
    assert _engines(found) == ["eager", "fake", "eager"]


def test_a_region_of_views_alone_stays_eager() -> None:
    """There is nothing to compute in it."""
    found = _partition(
        lambda x: torch.sort(x.t().unsqueeze(0))[0], torch.randn(4, 4), engines=[FakeEngine(refuses=["sort"])]
    )
    assert _engines(found) == ["eager"]


def test_min_region_nodes_demotes_smaller_regions() -> None:
    """Views do not count; the sentence names the setting."""
    function = lambda x: x.sin().t().cos()  # noqa: E731
    kept = _partition(function, torch.randn(4, 4), engines=[FakeEngine()], config=Config(min_region_nodes=2))
    assert _engines(kept) == ["fake"]
    demoted = _partition(function, torch.randn(4, 4), engines=[FakeEngine()], config=Config(min_region_nodes=3))
    assert _engines(demoted) == ["eager"]
    refusal = demoted.nodes[0].refusals[0]
    assert refusal.code is Reason.TOO_SMALL
    assert "HYBRID_MIN_REGION_NODES" in refusal.why


def test_demoted_operators_go_to_the_next_engine() -> None:
    """Too small for the first engine is not too small for one that takes its neighbours as well."""
    first, second = FakeEngine("first", takes=["sin"]), FakeEngine("second")
    config = Config(min_region_nodes=2)
    found = _partition(lambda x: x.cos().sin().exp(), torch.randn(4), engines=[first, second], config=config)
    assert _engines(found) == ["second"]


def test_effects_are_eager_and_keep_their_order() -> None:
    """A mutation after a read of the same memory stays after it; engines are not even asked."""

    def update(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = (cache @ x).sin()
        aten.copy_.default(cache, x)
        return before

    engine = FakeEngine()
    found = _partition(update, torch.randn(3, 3), torch.randn(3, 3), engines=[engine])
    assert _engines(found) == ["fake", "eager"]
    assert not any("copy" in name for name in engine.asked)
    cache, x = torch.randn(3, 3), torch.randn(3, 3)
    expected = (cache @ x).sin()
    assert torch.equal(_run(found.graph, [cache, x])[0], expected)  # type: ignore[arg-type]
    assert torch.equal(cache, x)


def test_a_broadcast_made_early_crosses_no_segment() -> None:
    """An expand that only the second region reads is made in it: what crosses is the narrow value."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = x @ w
        mask = aten.expand.default(z.sum(1, keepdim=True), [4, 400])
        y = torch.sort(z)[0]
        return (y @ w) * mask

    found = _partition(function, torch.randn(4, 400), torch.randn(400, 400), engines=[FakeEngine(refuses=["sort"])])
    assert _engines(found) == ["fake", "eager", "fake"]
    first, _, last = found.graph.segments
    assert sorted(spec.shape for spec in first.region.outputs if spec) == [(4, 1), (4, 400)]
    assert any("expand" in name for name in last.region.node_names)


def test_constants_are_marked_as_such() -> None:
    """A placeholder with meta["constant"] is a constant of the graph and of each region that reads it."""
    module = trace(lambda x, w: x @ w, torch.randn(2, 2), torch.randn(2, 2))
    weight = list(module.graph.nodes)[1]
    weight.meta["constant"] = True
    found = partition_graph(module, [FakeEngine()], Config()).graph
    assert found.constants == {weight.name}
    assert [(i.name, i.is_constant) for i in found.segments[0].region.inputs] == [("x_1", False), (weight.name, True)]


def test_tensor_constants_are_copied_into_the_regions_that_read_them() -> None:
    """get_attr nodes belong to no segment of their own, unless the graph returns them."""
    constant = torch.randn(3)
    found = _partition(
        lambda x: (torch.sort(x * constant)[0] * constant, constant),
        torch.randn(3),
        engines=[FakeEngine(refuses=["sort"])],
    )
    x = torch.randn(3)
    product, returned = _run(found.graph, [x])
    assert torch.equal(product, torch.sort(x * constant)[0] * constant)  # type: ignore[arg-type]
    assert torch.equal(returned, constant)  # type: ignore[arg-type]


def test_literal_outputs_are_kept() -> None:
    """None and numbers among the outputs are returned as they are; an input may be returned too."""
    found = _partition(lambda x: (x.sin(), None, 3, x), torch.randn(3), engines=[FakeEngine()])
    x = torch.randn(3)
    results = _run(found.graph, [x])
    assert results[1:3] == [None, 3]
    assert results[3] is x


def test_an_engine_that_raises_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that raises gets one warning, RUNTIME_ERROR for the operators; under strict a RegionError."""

    class Broken(FakeEngine):
        def supports(self, node: torch.fx.Node) -> Verdict:
            raise KeyError("oops")

    found = _partition(lambda x: x.sin().cos(), torch.randn(3), engines=[Broken("broken")])
    assert _engines(found) == ["eager"]
    assert [node.refusals[0].code for node in found.nodes] == [Reason.RUNTIME_ERROR] * 2
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    with pytest.raises(RegionError, match="broken raised"):
        _partition(lambda x: x.sin(), torch.randn(3), engines=[Broken("broken")], config=Config(strict=True))


_OPERATORS = (torch.sin, torch.cos, torch.exp, torch.t, torch.add, torch.mul, torch.mm)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(_OPERATORS))), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=20,
    ),
    st.sets(st.sampled_from(["sin", "cos", "exp", "aten.t.", "add", "mul", "mm"])),
)
def test_segments_cover_every_operator_once_and_compute_the_same(
    steps: list[tuple[int, int, int]], refused: set[str]
) -> None:
    """Random graphs, random support: run segment by segment the result is that of the whole."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x]
        for operator, left, right in steps:
            call = _OPERATORS[operator]
            operands = [values[left % len(values)], values[right % len(values)]]
            values.append(call(*operands[: 1 if operator < 4 else 2]))
        return values[-1], values[len(values) // 2]

    x = torch.rand(3, 3) / 4
    module = trace(function, x)
    found = partition_graph(module, [FakeEngine(refuses=sorted(refused))], Config())
    covered = [name for segment in found.graph.segments for name in segment.region.node_names]
    operators = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert sorted(covered) == sorted(operators)
    assert [node.name for node in found.nodes] == operators
    for result, expected in zip(_run(found.graph, [x]), module(x), strict=True):
        assert torch.equal(result, expected) or (result.isnan() == expected.isnan()).all()  # type: ignore[arg-type,attr-defined]


def test_thousands_of_nodes_take_few_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of sweeps over the graph does not grow with it."""

    def deep(x: torch.Tensor) -> torch.Tensor:
        for i in range(2_000):
            x = torch.relu(x) + 1
            if i % 20 == 0:
                x = torch.sort(x)[0]
        return x

    module = trace(deep, torch.randn(4, 4))
    sweeps = 0
    original = levels._levels

    def counted(*arguments: object) -> list[int]:
        nonlocal sweeps
        sweeps += 1
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(levels, "_levels", counted)
    engine = FakeEngine(refuses=["sort"])
    found = partition_graph(module, [engine], Config())
    assert len(found.nodes) > 4_000
    assert len(engine.asked) == sum(node.operator != "getitem" for node in found.nodes)  # those go with their sort
    assert len(found.graph.segments) == 201
    assert sweeps <= 2 * 3  # two rotations per cut, and no more than three cuts


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("takes", [("",), ("mm", "sin"), ()])
def test_collectives_run_in_the_graphs_order_whoever_runs_the_rest(takes: tuple[str, ...]) -> None:
    """The last reduction waits for nothing between, so that it could join the first one's segment: it must not."""

    def function(x: torch.Tensor) -> torch.Tensor:
        first = _reduced(x @ x, "first")
        second = _reduced(first.sin() @ x, "second")
        third = _reduced((x @ x).sin() @ x, "third")
        return second @ third

    found = _partition(function, torch.randn(3, 3), engines=[FakeEngine(takes=takes)])
    nodes = [node for segment in found.graph.segments for node in segment.region.graph_module.graph.nodes]
    groups = [node.args[2] for node in nodes if node.target is c10d.all_reduce.default]
    assert groups == ["first", "second", "third"]
    assert ("fake" in _engines(found)) == bool(takes)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_engines_do_not_touch_what_a_collective_still_writes() -> None:
    """A view between a collective and its wait is eager's, and nobody copies it to other strides; what comes after the wait may be an
    engine's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        started = c10d.all_reduce(x, "sum", "0")
        view = started.view(-1)
        between = _reduced((_reduced(x, "1") @ x).sin(), "2")  # so that what was started leaves its segment
        return c10d.wait_tensor(view).view(3, 3) @ between

    found = _partition(function, torch.randn(3, 3), engines=[FakeEngine()])
    assert [node.engine for node in found.nodes if node.name == "view"] == ["eager"]
    assert [node.engine for node in found.nodes if node.operator == "aten.mm.default"] == ["fake", "fake"]
    specs = {
        name: spec
        for segment in found.graph.segments
        for name, spec in zip(segment.outputs, segment.region.outputs, strict=True)
    }
    assert specs["all_reduce"] is None
    assert specs["wait_tensor"] is not None
