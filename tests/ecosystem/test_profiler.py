"""torch.profiler: regions are named ranges, by the names of the plan."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import torch_hybrid_backend
from tests.end_to_end import models
from torch_hybrid_backend.driver import session

_MODEL, _X = models.perceptron(), models.rows()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A region, an operator that only eager runs, another region."""
    square = torch.relu(_MODEL(x)) @ torch.ones(9, 6) + 9 * torch.eye(6)
    return torch.linalg.inv(square).sigmoid() * 2 + 1


def _profiled(*, dynamic: bool) -> list[FunctionEvent]:
    fast = torch.compile(_mixed, backend="hybrid", dynamic=dynamic)
    expected = _mixed(_X)
    fast(_X)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.testing.assert_close(fast(_X), expected, rtol=1e-4, atol=1e-5)
    return list(profiler.events())


@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_are_named_ranges(dynamic: bool) -> None:
    """Each region of the plan is one range, named after it and its engine; eager's operators lie inside eager's ranges."""
    with torch.no_grad():
        events = _profiled(dynamic=dynamic)
        (plan,) = torch_hybrid_backend.explain(_mixed, _X, dynamic=dynamic).plans
    names = [event.name for event in events]
    for region in plan.regions:
        assert names.count(f"hybrid::{region.name} {region.engine}") == 1
    (inverse,) = (event for event in events if event.name == "aten::linalg_inv_ex")
    parents = []
    while inverse.cpu_parent is not None:
        inverse = inverse.cpu_parent
        parents.append(inverse.name)
    assert any(name.startswith("hybrid::") and name.endswith(" eager") for name in parents)


def test_kernels_lie_inside_their_region() -> None:
    """Each kernel of a region is a range of its own inside the region's."""
    with torch.no_grad():
        events = _profiled(dynamic=False)
        (plan,) = torch_hybrid_backend.explain(_mixed, _X).plans
    first = plan.regions[0]
    assert first.engine == "tvm"
    inside = [event for event in events if event.cpu_parent and event.cpu_parent.name == f"hybrid::{first.name} tvm"]
    assert len(inside) == len(first.kernels) > 1


def test_the_first_call_shows_placement() -> None:
    """In the call that chooses engines, a region's range says so."""
    fast = torch.compile(_mixed, backend="hybrid", dynamic=False)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        fast(_X)
    assert any(event.name.startswith("hybrid::") and event.name.endswith(" placement") for event in profiler.events())


def test_launches_of_the_triton_engine_are_named_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its region and its own name, which says what it computes; here by Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(session, "_sessions", {})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HYBRID_ENGINES", "triton")
    monkeypatch.setenv("HYBRID_STRICT", "1")
    with torch.no_grad():
        events = _profiled(dynamic=False)
        (plan,) = torch_hybrid_backend.explain(_mixed, _X).plans
    region = plan.regions[0]
    assert region.engine == "triton"
    inside = [
        event.name for event in events if event.cpu_parent and event.cpu_parent.name == f"hybrid::{region.name} triton"
    ]
    assert len(inside) == len(region.kernels) > 1
    assert all(title.startswith(name) for title, name in zip(inside, region.kernels, strict=True))
    assert any(name.startswith("matmul_") for name in inside)
