"""The eager engine accepts everything and computes what PyTorch computes."""

from __future__ import annotations

import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, Engine
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.partition.regions import partition_graph


def test_it_is_an_engine_that_takes_everything() -> None:
    """The protocol is kept; no operator is refused."""
    engine = EagerEngine()
    assert isinstance(engine, Engine)
    assert engine.available()
    graph = trace(lambda x: torch.sort(x)[0], torch.randn(3)).graph
    assert all(engine.supports(node) for node in graph.nodes if node.op == "call_function")


def test_a_compiled_region_computes_its_graph_without_gradients() -> None:
    """Several outputs come in order; nothing is recorded, though an input wants gradients."""
    x = torch.randn(3, 4, requires_grad=True)
    module = trace(lambda v: (v.sin(), v.sum(0)), torch.randn(3, 4))
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    (compiled,) = EagerEngine().compile([segment.region], Deadline(1.0))
    assert isinstance(compiled, CompiledRegion)
    assert compiled.program is None
    sine, total = compiled([x])
    assert torch.equal(sine, x.sin())
    assert torch.equal(total, x.sum(0))
    assert not sine.requires_grad
