"""Plans of bodies within the plan that calls them: numbers are one plan's, and what nothing reads is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.hoisted_inputs import CallInput
from torch_hybrid_backend.core.program import NULL, Branch, Callback, Loop, Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.runtime.executor import PlanOutput, SavedPlan
from torch_hybrid_backend.runtime.inner_plans import ControlFlow, with_control_flow
from torch_hybrid_backend.runtime.native.description import (
    Life,
    PlanDescription,
    PlanStep,
    PlanValue,
    ValueKind,
)
from torch_hybrid_backend.runtime.native.ops import Binding, Guard, Plan

ROW, TRUTH = TensorSpec((4,), "float32", (1,), CPU), TensorSpec((), "bool", (), CPU)
Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def saved(
    values: Sequence[tuple[ValueKind, int, TensorSpec]],
    steps: Sequence[Step],
    outputs: Sequence[int],
    functions: Mapping[int, Function],
    inputs: Sequence[Any],
    slots: Sequence[torch.Tensor] = (),
) -> SavedPlan:
    """A plan whose outputs are the graph's."""
    described = PlanDescription(
        [PlanValue(*value) for value in values],
        [PlanStep(step) for step in steps],
        len(inputs),
        len(slots),
        outputs,
        {},
    )
    results = tuple(PlanOutput(number) for number in range(len(outputs)))
    return SavedPlan(described, functions, {}, tuple(inputs), tuple(slots), results)


def body(function: Function, result: TensorSpec = ROW) -> SavedPlan:
    """A plan of one input that calls a function, with a constant that nothing reads."""
    values = [
        (ValueKind.RAW_INPUT, 0, ROW),
        (ValueKind.CONSTANT, 0, ROW),
        (ValueKind.RETURNED, 0, result),
    ]
    return saved(values, [Callback(0, (0,), (2,))], [2], {0: function}, [CallInput(0)], [torch.zeros(4)])


def outer(spec: TensorSpec = TRUTH) -> SavedPlan:
    """A plan with a callback, number 0, of a value to ask, one to compute with and a weight; and another callback on the result."""
    values = [
        (ValueKind.RAW_INPUT, 0, spec),
        (ValueKind.RAW_INPUT, 1, ROW),
        (ValueKind.RAW_INPUT, 2, ROW),
        (ValueKind.RETURNED, 0, ROW),
        (ValueKind.RETURNED, 0, ROW),
    ]
    steps = [Callback(0, (1, 0, 2), (3,)), Callback(3, (3,), (4,))]
    functions: dict[int, Function] = {0: pytest.fail, 3: lambda tensors: [tensors[0] * 10]}
    inputs = [CallInput(1), CallInput(0), torch.ones(4)]
    return saved(values, steps, [3, 4], functions, inputs, [torch.ones(4)])


def run(plan: SavedPlan, *call: torch.Tensor) -> list[torch.Tensor]:
    """Run the C++ plan in a call."""
    functions = [plan.functions.get(number, pytest.fail) for number in range(max(plan.functions) + 1)]
    made = Plan(plan.description, functions)
    binding = Binding(made, Guard([]), dict(enumerate(plan.slots)), {})
    given = [call[source.position] if isinstance(source, CallInput) else source for source in plan.inputs]
    outputs = made.run(binding, given)
    assert outputs is not None
    return outputs


def test_a_branch() -> None:
    """Functions and slots of all plans are numbered together; the weight, which no body reads, is an input no more."""
    bodies = body(lambda tensors: [tensors[0] + 1]), body(lambda tensors: [tensors[0] - 1])
    whole = with_control_flow(outer(), {0: ControlFlow(bodies, 1, (0, 2), 0, (0,))})
    assert whole.inputs == (CallInput(1), CallInput(0))
    assert sorted(whole.functions) == [3, 4, 5]
    assert [plan.constants for plan in (whole.description, *whole.description.plans)] == [3, 3, 3]
    assert [plan.values[1].payload for plan in whole.description.plans] == [1, 2]
    step = whole.description.steps[0].step
    assert step == Branch((0, 1), (1,), (2,), predicate=0)
    x = torch.randn(4)
    for flag, change in ((True, 1), (False, -1)):
        for one, other in zip(run(whole, x, torch.tensor(flag)), (x + change, (x + change) * 10), strict=True):
            assert torch.equal(one, other)


def test_a_loop_in_a_branch() -> None:
    """Plans of a body's own come before it; what a loop is given and what it returns may be tensors that always stay the same."""
    condition = body(lambda tensors: [tensors[0].sum() < 100], TRUTH)
    doubled = body(lambda tensors: [tensors[0] * 2])
    loop = with_control_flow(
        saved(
            [(ValueKind.RAW_INPUT, 0, ROW), (ValueKind.RETURNED, 0, ROW)],
            [Callback(0, (0,), (1,))],
            [1],
            {0: pytest.fail},
            [CallInput(0)],
        ),
        {0: ControlFlow((condition, doubled), None, (0,), 1, (0,))},
    )
    (step,) = loop.description.steps
    assert step.step == Loop((0, 1), (0,), (1,))
    table = torch.arange(4.0)
    constant = replace(loop, outputs=(table,))
    whole = with_control_flow(outer(), {0: ControlFlow((loop, constant), 1, (0, 2), 0, (0,))})
    assert [plan.inputs for plan in whole.description.plans] == [1, 1, 2, 1, 1, 2]
    assert whole.inputs[:2] == (CallInput(1), CallInput(0))
    assert whole.inputs[2] is table
    x = torch.ones(4)
    assert torch.equal(run(whole, x, torch.tensor(True))[0], x * 32)
    assert torch.equal(run(whole, x, torch.tensor(False))[0], table)


def test_results_that_nobody_reads() -> None:
    """A loop carries them all the same; a branch does not compute them."""
    two = replace(body(lambda tensors: [tensors[0] * 2]), outputs=(CallInput(1), PlanOutput(0)))
    condition = replace(body(lambda tensors: [tensors[0].sum() < 10], TRUTH), outputs=(PlanOutput(0),))
    whole = with_control_flow(outer(ROW), {0: ControlFlow((condition, two), None, (0, 2), 2, (1,))})
    step = whole.description.steps[0].step
    assert isinstance(step, Loop)
    assert step.outputs == (NULL, 2)
    assert len(step.inputs) == 2
    whole = with_control_flow(outer(), {0: ControlFlow((two, two), 1, (0, 2), 0, (1,))})
    assert [len(plan.outputs) for plan in whole.description.plans] == [1, 1]


def test_numbers_of_values_that_stay() -> None:
    """Aliases, outputs and lives follow the values that stay, where an input is dropped before them."""
    plain = outer()
    values = [
        *plain.description.values[:3],
        PlanValue(ValueKind.ARENA, 0, ROW),
        *plain.description.values[3:],
        PlanValue(ValueKind.ALIAS, 4, TensorSpec((2,), "float32", (1,), CPU), 1),
    ]
    steps = [PlanStep(Callback(0, (1, 0, 2), (4,))), PlanStep(Callback(3, (4,), (5,)))]
    description = replace(plain.description, values=values, steps=steps, outputs=(5, 6), lives={CPU: (Life(3, 0, 1),)})
    bodies = body(lambda tensors: [tensors[0] + 1]), body(lambda tensors: [tensors[0] - 1])
    whole = with_control_flow(replace(plain, description=description), {0: ControlFlow(bodies, 1, (0, 2), 0, (0,))})
    described = whole.description
    assert [value.kind for value in described.values].count(ValueKind.RAW_INPUT) == 2
    assert described.values[-1].payload == 3
    assert described.outputs == [4, 5]
    assert described.lives == {CPU: [Life(2, 0, 1)]}


def test_what_no_plan_can_hold() -> None:
    """Numbers among operands that bodies read, and results that are none."""
    bodies = body(lambda tensors: [tensors[0] + 1]), body(lambda tensors: [tensors[0] - 1])
    with pytest.raises(NotExportableError, match="hands a number to what it calls"):
        with_control_flow(outer(), {0: ControlFlow(bodies, 1, (None,), 0, (0,))})
    number = replace(bodies[0], outputs=(3,))
    with pytest.raises(NotExportableError, match="returns 3: return a tensor"):
        with_control_flow(outer(), {0: ControlFlow((number, number), 1, (0, 2), 0, (0,))})
