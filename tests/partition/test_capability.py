"""Asking engines: what they may do while they are asked, and what becomes of an engine that raises."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import FakeEngine, LoopsEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.errors import RegionError
from torch_hybrid_backend.partition.capability import accepted, capability
from torch_hybrid_backend.partition.regions import partition_graph


class _Branching(FakeEngine):
    """An engine that looks at a size as if it were a number."""

    def supports(self, node: torch.fx.Node) -> Verdict:
        value = node.meta["val"]
        return Supported() if not isinstance(value, torch.Tensor) or value.shape[0] > 3 else super().supports(node)


class _Computing(FakeEngine):
    """An engine that computes with tensors of its own."""

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported() if float(torch.arange(3).sum()) == 3.0 else super().supports(node)


@pytest.mark.parametrize("strict", [False, True])
def test_a_size_that_only_data_tell_is_a_refusal(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's question has no answer yet: refused with a code, without a warning, under strict too."""
    gm = make_fx(lambda x: x.nonzero() + 1, tracing_mode="symbolic")(torch.ones(5))
    operators = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    with caplog.at_level(logging.WARNING):
        ((verdict,),) = capability(operators, [_Branching()], strict=strict).values()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.SYMBOLIC_SHAPE
    assert "aten.add.Tensor" in verdict.why
    assert not caplog.records


def test_an_engine_may_compute_while_it_is_asked() -> None:
    """AOTAutograd's fake tensors are not imposed on an engine's own."""
    gm = make_fx(torch.sin, tracing_mode="fake")(torch.ones(5))
    operators = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    with FakeTensorMode():
        ((verdict,),) = capability(operators, [_Computing()], strict=True).values()
    assert verdict


def test_an_engine_that_raises_when_asked_about_a_region(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that raises about a region does not get that region: one warning, or RegionError under strict. While it is asked it may compute
    with tensors of its own."""

    class Raising(FakeEngine):
        def accepts(self, region: Region) -> Verdict:
            raise ValueError(f"sum {float(torch.arange(3).sum())}")

    engine = Raising("raising")
    (segment,) = partition_graph(trace(torch.sin, torch.ones(3)), [engine], Config()).graph.segments
    with FakeTensorMode():
        verdict = accepted(engine, segment.region, strict=False)
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.RUNTIME_ERROR
    assert "raising raised when asked about region r0: ValueError: sum 3.0" in verdict.why
    assert len(caplog.records) == 1
    with pytest.raises(RegionError, match=r"sum 3\.0"):
        accepted(engine, segment.region, strict=True)
    assert accepted(FakeEngine(), segment.region, strict=True)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "meta"])
def test_engines_are_asked_about_devices_that_they_serve(device: str) -> None:
    """An engine for some devices is asked about operators there alone, one for every device about all; the refusal names both sides."""
    engines = [FakeEngine("host", devices=["cpu"]), FakeEngine("gpu", devices=["cuda", "xpu"]), FakeEngine("any")]
    with FakeTensorMode():
        graph = make_fx(lambda x: torch.relu(x) + 1)(torch.empty(4, device=device)).graph
    operators = [node for node in graph.nodes if node.op == "call_function"]
    found = capability(operators, engines, strict=True)
    serving = {"cpu": ["host", "any"], "cuda:1": ["gpu", "any"], "meta": ["any"]}[device]
    assert [engine.name for engine in engines if engine.asked] == serving
    for node, verdicts in found.items():
        assert [engine.name for engine, verdict in zip(engines, verdicts, strict=True) if verdict] == serving
        refused = [verdict for verdict in verdicts if isinstance(verdict, Refused)]
        assert {verdict.code for verdict in refused} == {Reason.DEVICE}
        shown = str(Device.of(torch.device(device)))
        whys = {
            f"{node.target} is on {shown}, host serves cpu",
            f"{node.target} is on {shown}, gpu serves cuda and xpu",
        }
        assert {verdict.why for verdict in refused} <= whys


def test_no_engine_is_asked_about_what_goes_between_devices() -> None:
    """Not even one that serves both."""
    engine = FakeEngine()
    with FakeTensorMode():
        graph = make_fx(lambda x: torch.ops.aten._to_copy(x, device="cpu"))(torch.empty(4, device="cuda")).graph
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    ((verdict,),) = capability(copies, [engine], strict=True).values()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.DEVICE
    assert engine.asked == []


@pytest.mark.parametrize("function", [lambda z: z.real.neg(), lambda z: z.imag + 1, torch.conj])
def test_no_engine_is_asked_about_conjugated_and_negated_views(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Their memory does not hold their values: neither operators that read them nor those that make them are an engine's."""
    engine = FakeEngine()
    with FakeTensorMode():
        graph = make_fx(lambda z: function(z.conj()))(torch.empty(4, dtype=torch.complex64)).graph
    operators = [node for node in graph.nodes if node.op == "call_function"]
    lazy = [
        n for n in operators if any(v.meta["val"].is_conj() or v.meta["val"].is_neg() for v in (n, *n.all_input_nodes))
    ]
    assert lazy
    for verdict in capability(lazy, [engine], strict=True).values():
        (refused,) = verdict
        assert isinstance(refused, Refused)
        assert refused.code is Reason.LAYOUT
    assert engine.asked == []


def test_only_engines_that_draw_are_asked_about_random_numbers() -> None:
    """And about nothing else that has effects. The others refuse, as does an engine whose kernels cannot draw them, by a code of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.native_dropout(x, 0.5, True)[0] + torch.rand_like(x)
        torch._assert_async((y > 0).all())
        return y.bernoulli_(0.5)

    drawing, other, loops = FakeEngine("drawing"), FakeEngine("other"), LoopsEngine()
    drawing.draws = loops.draws = True
    gm = trace(function, torch.ones(5))
    verdicts = capability([n for n in gm.graph.nodes if n.op == "call_function"], [drawing, other, loops], strict=True)
    by_name = {str(node.target).removeprefix("aten.").split(".")[0]: verdict for node, verdict in verdicts.items()}
    for name in ("native_dropout", "rand_like"):
        mine, others, refused = by_name[name]
        assert mine
        assert isinstance(others, Refused)
        assert isinstance(refused, Refused)
        assert (others.code, refused.code) == (Reason.UNKNOWN_OPERATOR, Reason.RANDOM)
    assert not any(by_name["bernoulli_"])
    assert not any(by_name["_assert_async"])
    assert {"native_dropout", "rand_like"} <= set(drawing.asked)
    assert not {"native_dropout", "rand_like"} & set(other.asked)
