"""Plans as JSON: what is written comes back, in one stable form."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.plan import (
    CallDecision,
    Ceilings,
    Conversion,
    Cost,
    GraphInput,
    KernelTime,
    ModuleCall,
    NodeDecision,
    Plan,
    Profile,
    Refusal,
    RegionDecision,
    Unconverted,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.sizes.size import ceil_div, symbol

S, T = symbol("s0"), symbol("s1")
_texts = st.sampled_from(["", "tvm", "eager", "model.py:12 in forward: y = 'x' @ w", "größer\n\\u0041"])
_numbers = st.sampled_from([0.0, 1.25, 1e-300, 12345.678, 1 / 3])
_sizes = st.sampled_from([0, 1, 7, S, S * 2 + 1, ceil_div(S * T, 16), symbol("[u0 + 1]")])
_devices = st.sampled_from([CPU, Device("meta"), Device("cuda", 3)])


def _several(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(values, max_size=3).map(tuple)


_specs = st.builds(TensorSpec, _several(_sizes), st.sampled_from(["float32", "bool"]), _several(_sizes), _devices)
_refusals = _several(st.builds(Refusal, _texts, st.sampled_from(Reason), _texts))
_costs = _several(st.builds(Cost, _texts, _numbers, st.sampled_from(["measured", "cached", "estimated"])))
_nodes = st.builds(
    NodeDecision, _texts, _texts, _texts, _texts, _texts, st.integers(0, 1 << 60), _refusals, st.none() | _devices,
    _several(_texts), _several(_specs), _texts, st.booleans(),
)  # fmt: skip
_regions = st.builds(
    RegionDecision, _texts, _texts, _texts, _several(_texts), _several(_specs), _several(_specs), _costs, _refusals,
    st.none() | _numbers, st.integers(0, 1 << 60), _several(_texts), _texts, _devices, _several(_texts),
    _several(_texts), st.none() | _numbers,
)  # fmt: skip
_calls = st.none() | st.builds(CallDecision, _texts, _costs, _refusals)
_graphs = _several(_several(_texts))
_counts = st.integers(0, 1 << 30)
_conversions = st.builds(
    Conversion, _texts, _numbers, _counts, _several(st.tuples(_texts, _counts)), _counts, _counts,
    _several(st.builds(Unconverted, _texts, _texts, st.sampled_from(Reason), _texts, _texts)), st.none() | _numbers, _texts,
)  # fmt: skip
_kernel_times = st.builds(
    KernelTime, _texts, _texts, _several(_texts), _several(_texts), _texts, _numbers, _counts, _counts, _texts
)
_ceilings = st.builds(Ceilings, _counts, _several(st.tuples(_texts, _numbers)), _numbers)
_profiles = st.builds(
    Profile, _numbers, _counts, _several(_kernel_times), _numbers, st.none() | _ceilings, st.booleans(), st.booleans()
)
_plans = st.builds(
    Plan,
    _texts,
    st.just("inference"),
    _several(_nodes),
    _several(_regions),
    _calls,
    _costs,
    _graphs,
    st.none() | _conversions,
    _texts,
    st.none() | _profiles,
    _several(st.builds(GraphInput, _texts, st.none() | _specs, st.booleans(), _texts)),
    _several(_texts),
    _several(st.builds(ModuleCall, _texts, _texts, _texts)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_plans)
def test_plans_come_back_from_json(plan: Plan) -> None:
    """Every field, sizes known only at run time included, is read back as it was; the text of the copy is the same."""
    text = plan.to_json()
    copy = Plan.from_json(text)
    assert copy == plan
    assert copy.to_json() == text
    assert hash(copy) == hash(plan)


_SPEC = TensorSpec((S, 3), "float32", (3, 1), CPU)
_REGION = RegionDecision("r0", "tvm", "ab", ("mm",), (_SPEC,), (), (), (), None, 0, ("map_add",), "", CPU)
_PLAN = Plan("graph", "inference", (), (_REGION,))


def test_text_is_for_other_programs_to_read() -> None:
    """Keys are sorted, sizes that are numbers are numbers and others texts, codes are their stable names."""
    refused = Refused(Reason.TOO_SMALL, "it has 2 operators")
    plan = dataclasses.replace(_PLAN, call=CallDecision("eager", (), (Refusal.of("plan", refused),)))
    raw = json.loads(plan.to_json())
    assert json.dumps(raw, indent=2, sort_keys=True) == plan.to_json()
    assert raw["regions"][0]["inputs"][0]["shape"] == ["s0", 3]
    assert raw["call"]["refusals"] == [{"engine": "plan", "code": "too_small", "why": "it has 2 operators"}]


@pytest.mark.parametrize(
    ("written", "changed"),
    [('"s0"', '"__import__(\\"os\\").getpid()"'), ('"too_small"', '"too_tall"'), ('"s0"', '"s0 +"')],
)
def test_what_is_no_plan_is_refused(written: str, changed: str) -> None:
    """A size that is no arithmetic and a reason that does not exist are ValueErrors; nothing of them is run."""
    region = dataclasses.replace(_REGION, refusals=(Refusal("tvm", Reason.TOO_SMALL, ""),))
    text = dataclasses.replace(_PLAN, regions=(region,)).to_json()
    assert written in text
    with pytest.raises(ValueError, match=r"is no size|is not a valid Reason"):
        Plan.from_json(text.replace(written, changed, 1))


def test_what_json_cannot_hold_is_an_error() -> None:
    """A plan that someone put a live object in is no plan: nothing is written in its place."""
    broken = dataclasses.replace(_PLAN, regions=(dataclasses.replace(_REGION, max_error=torch.tensor(1.0)),))
    with pytest.raises(TypeError):
        broken.to_json()
