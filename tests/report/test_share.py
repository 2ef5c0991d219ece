"""Facts about plans that all reports share."""

from __future__ import annotations

import dataclasses

import pytest

from tests.report.plans_for_tests import EMPTY, PLAN, USED
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.plan import CallDecision, Cost, GraphInput
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.report import summary
from torch_hybrid_backend.report.share import (
    RefusedOperators,
    call_in_words,
    flops_in_words,
    operator_kinds,
    refused_operators,
    shares,
    title,
)
from torch_hybrid_backend.sizes.size import Dim, symbol


def test_shares_of_flops_and_operators() -> None:
    """Shares are by engine, the largest first. The fractions add up to one."""
    tvm, eager = shares(PLAN)
    assert (tvm.engine, tvm.operators, tvm.flops, tvm.fraction) == ("tvm", 2, 3_000_000, 0.75)
    assert (eager.engine, eager.operators, eager.fraction) == ("eager", 4, 0.25)
    assert shares(EMPTY) == ()


def test_kinds_inside_and_outside_regions() -> None:
    """An operator of a region that eager runs counts as eager's."""
    assert operator_kinds(PLAN) == (
        ("aten.mm.default", 1, 1),
        ("aten.sort.default", 0, 2),
        ("aten.relu.default", 1, 0),
        ("getitem", 0, 1),
    )


def test_equal_refusals_are_counted_together() -> None:
    """Two sorts of one line, refused for the same reason, are one entry."""
    first, second = refused_operators(PLAN)
    assert isinstance(first, RefusedOperators)
    assert (first.operator, first.count, first.source.split(" ")[0]) == ("aten.sort.default", 2, "model.py:13")
    assert second.operator == "getitem"


def test_a_title_tells_graphs_apart() -> None:
    """Titles differ by model, use and input shapes, also symbolic ones. Parameters are no inputs."""

    def given(name: str, *shape: Dim, constant: bool = False) -> GraphInput:
        return GraphInput(name, TensorSpec(shape, "float32", shape, CPU), constant)

    inputs = (given("w", 9, constant=True), given("x", symbol("s0"), 3), GraphInput("n", None, False), given("scale"))
    plan = dataclasses.replace(EMPTY, graph="ResNet", kind="forward", inputs=inputs)
    assert title(plan) == "ResNet (training, forward, s0x3 float32, scalar float32)"
    many = dataclasses.replace(plan, kind="inference", inputs=tuple(given(f"x{k}", k + 1) for k in range(5)))
    assert title(many) == "ResNet (inference, 1 float32, 2 float32, 3 float32, 2 more inputs)"


def test_summary_is_one_line() -> None:
    """The summary is one line, for logs and the demo."""
    assert summary(PLAN) == (
        "graph (inference): 6 operators, 4.00 MFLOP, 2 regions; tvm runs 2 (75.0% of flops), eager runs 4 (25.0% of flops)"
    )
    assert summary(EMPTY) == "graph (training, backward): 0 operators, 0 regions; nothing to run"


@pytest.mark.parametrize(
    ("flops", "words"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (1500, "1.50 kFLOP"), (8_200_000_000, "8.20 GFLOP"), (3 * 10**12, "3.00 TFLOP")],
)
def test_flops_in_words(flops: int, words: str) -> None:
    """Units are powers of a thousand."""
    assert flops_in_words(flops) == words


def test_a_plan_that_runs_although_it_is_slower_says_why() -> None:
    """Times beside other load must differ by a margin. The reason follows the choice."""
    disturbed = (Cost("plan", 9.1, "disturbed"), Cost("eager", 8.0, "disturbed"))
    [told] = call_in_words(dataclasses.replace(PLAN, call=CallDecision("plan", disturbed, ())))
    assert told.endswith("the plan runs it, as another must be clearly faster")
    [told] = call_in_words(USED)
    assert told.endswith("the plan runs it")
