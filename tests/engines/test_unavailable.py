"""The stand-in for an engine that could not be made."""

from __future__ import annotations

import torch

from tests.codegen.regions_for_tests import region_of
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.engines.unavailable import UnavailableEngine
from torch_hybrid_backend.errors import CompileError


def test_it_refuses_everything_and_says_why() -> None:
    """Availability, operators and regions alike: one reason."""
    engine = UnavailableEngine(
        "broken", Refused(Reason.MISSING_DEPENDENCY, "no module named fast"), (("fast", "none"),)
    )
    refused = engine.available()
    assert refused == Refused(Reason.MISSING_DEPENDENCY, "no module named fast")
    assert engine.describe() == (("fast", "none"),)
    region = region_of(torch.exp, torch.rand(4))
    assert [engine.supports(node) for node in region.graph_module.graph.nodes] == [refused] * 3
    failed = engine.compile([region, region], Deadline(1.0))
    assert [type(error) for error in failed] == [CompileError] * 2
    assert {str(error) for error in failed} == {refused.why}
    assert (engine.name, engine.keeps_deadline) == ("broken", True)
