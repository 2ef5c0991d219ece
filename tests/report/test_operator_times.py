"""Times of operators, which add up to the timed part of a call."""

from __future__ import annotations

import dataclasses

import pytest

from tests.report.plans_for_tests import graph_of_blocks, profiled
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.plan import CallDecision, Cost, KernelTime, Profile
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.report.operator_times import operator_times

PLAN = graph_of_blocks(2)


def test_the_cost_of_a_region_is_divided_by_work() -> None:
    """Views get no part. A product and a sum of the same bytes get equal parts. Operators outside regions were not timed."""
    times = operator_times(PLAN)
    assert times.kind == "estimated"
    assert sum(times.microseconds.values()) == pytest.approx(200.0)
    assert times.microseconds["t_0"] == times.microseconds["sort"] == 0
    assert times.microseconds["mm_0"] == times.microseconds["add_1"] > times.microseconds["relu_0"] > 0


def test_operations_count_where_they_take_longer_than_bytes() -> None:
    """A product with many operations has nearly all of its region's cost."""
    heavy = tuple(dataclasses.replace(n, flops=10**9) if n.name == "mm_0" else n for n in PLAN.nodes)
    assert operator_times(dataclasses.replace(PLAN, nodes=heavy)).microseconds["mm_0"] > 199


def test_an_embedding_reads_few_rows_of_its_table() -> None:
    """A parameter counts with the bytes of the output, unless a product reads it."""
    large = dataclasses.replace(
        PLAN.inputs[0], name="table", spec=TensorSpec((1 << 20, 8), "float32", (8, 1), CPU), is_constant=True
    )
    looked_up = tuple(dataclasses.replace(n, inputs=("x", "table")) if n.name == "relu_0" else n for n in PLAN.nodes)
    times = operator_times(dataclasses.replace(PLAN, nodes=looked_up, inputs=(*PLAN.inputs, large))).microseconds
    assert times["relu_0"] == times["add_0"]


def test_a_call_that_eager_runs_costs_what_eager_costs() -> None:
    """The regions of an unused plan cost nothing, as eager runs the call."""
    call = CallDecision("eager", (Cost("plan", 900.0, "measured"), Cost("eager", 700.0, "measured")), ())
    times = operator_times(dataclasses.replace(PLAN, call=call))
    assert sum(times.microseconds.values()) == pytest.approx(700.0)
    assert times.microseconds["sort"] > 0


def test_without_any_time_work_is_compared() -> None:
    """Without times, the kind says that the numbers are work."""
    untimed = tuple(dataclasses.replace(region, costs=()) for region in PLAN.regions)
    times = operator_times(dataclasses.replace(PLAN, regions=untimed))
    assert times.kind == "work"
    assert times.microseconds["mm_0"] > 0


def test_kernels_count_for_the_operator_with_most_work() -> None:
    """A kernel belongs to each operator that it fuses, but its time counts once. The time of a segment of eager is divided. The overhead is
    separate."""
    plan = profiled(PLAN)
    assert plan.profile is not None
    times = operator_times(plan)
    assert (times.kind, times.other_us) == ("measured", 20.0)
    assert times.microseconds["mm_0"] == times.microseconds["mm_1"] == 50.0
    assert times.microseconds["add_0"] == times.microseconds["relu_1"] == 0
    assert times.microseconds["sort"] == 80.0
    assert times.kernels["add_0"] == times.kernels["mm_0"] == [plan.profile.kernels[0]]
    assert sum(times.microseconds.values()) + times.other_us == plan.profile.call_us


def test_rows_of_dynamos_operators_are_found_by_module() -> None:
    """Rows of Dynamo's operators are matched by module if eager won the whole call. Rows of modules that the plan lacks count as other time."""
    rows = (
        KernelTime("", "eager", ("l_x_",), ("layers.0.linear",), "", 30.0, 0, 0),
        KernelTime("", "eager", ("l_y_",), ("elsewhere",), "", 7.0, 0, 0),
    )
    times = operator_times(dataclasses.replace(PLAN, profile=Profile(40.0, 5, rows, 3.0)))
    assert times.microseconds["mm_0"] == 30.0
    assert times.other_us == 10.0
