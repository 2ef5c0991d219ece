"""The description of a plan: what is written in Python is what C++ reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.runtime.plans import Draft
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import DeviceLaunch, KernelCall, LaunchGraph, ScalarArgument, Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.native import description
from torch_hybrid_backend.runtime.native.description import PlanDescription, PlanStep, PlanValue, ValueKind
from torch_hybrid_backend.runtime.native.ops import Binding, Guard, Plan

EMPTY = PlanDescription((), (), 0, 0, (), {})
CUDA = Device("cuda", 1)


def test_a_plan_is_one_text() -> None:
    """Values, steps, their devices and the names that C++ opens files under."""
    launch = DeviceLaunch(
        "a.cubin", "scale", (0, 1), 1, (3, 1, 1), 128, (ScalarArgument("float32", 0.5),), 49152, (-1, 2)
    )
    value = PlanValue(ValueKind.INPUT, 2, TensorSpec((2, 3), "bfloat16", (3, 1), CPU))
    steps = (PlanStep(KernelCall("a.so", "double", (0, 0), 1, (7,))), PlanStep(launch, CUDA))
    described = PlanDescription((value,), steps, 3, 4, (0,), {CUDA: 512})
    text = described.text(lambda member, path: f"{member}:{path}")
    assert json.loads(text) == {
        "version": 1,
        "values": [["input", 2, "bfloat16", [2, 3], [3, 1], "cpu"]],
        "steps": [
            {"kind": "kernel", "library": "library:a.so", "symbol": "double", "arguments": [0, 0], "sizes": [7]},
            {
                "kind": "launch",
                "device": "cuda:1",
                "module": "module:a.cubin",
                "symbol": "scale",
                "arguments": [0, 1],
                "scalars": [["float32", 0.5]],
                "grid": [3, 1, 1],
                "threads": 128,
                "shared_bytes": 49152,
                "scratch": [-1, 2],
            },
        ],
        "ranges": [],
        "arenas": [["cuda:1", 512]],
        "inputs": 3,
        "constants": 4,
        "outputs": [0],
    }


def test_modules_of_a_graph_are_opened() -> None:
    """Its launches have names that C++ opens files under, as a launch by itself; the device is said once."""
    launches = tuple(DeviceLaunch(f"{name}.cubin", name, (0, 1), 1, (1, 1, 1), 32) for name in "ab")
    described = replace(EMPTY, steps=(PlanStep(LaunchGraph(launches), CUDA),))
    (step,) = json.loads(described.text(lambda member, path: f"{member}:{path}"))["steps"]
    assert (step["kind"], step["device"], step["writes"]) == ("graph", "cuda:1", [[1], [1]])
    assert [launch["module"] for launch in step["launches"]] == ["module:a.cubin", "module:b.cubin"]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that was built from other sources says so, and what to do."""
    monkeypatch.setattr(description, "VERSION", 99)
    with pytest.raises(HybridError, match=r"reads plans of version 1, not of version 99: build it again"):
        Plan(EMPTY)


def test_an_unknown_kind_of_step_is_refused() -> None:
    """The error lists the kinds that there are."""

    @dataclass(frozen=True, slots=True)
    class Dance(Step):
        def over(self, memory: Any, tensor: Any) -> Step:
            return self

        def describe(self) -> dict[str, Any]:
            return {"kind": "dance"}

    with pytest.raises(HybridError, match=r'no kind of step is called "dance": it must be one of kernel, copy, check'):
        Plan(replace(EMPTY, steps=(PlanStep(Dance()),)))


def test_titles_may_hold_any_text() -> None:
    """Profilers show a segment by its line of code, whatever is in it."""
    draft = Draft([lambda inputs: [inputs[0] + 1]])
    x = draft.add_value(ValueKind.RAW_INPUT, 0, torch.float32, [1], [1])
    out = draft.add_value(ValueKind.RETURNED, 0, torch.float32, [1], [1])
    title = 'model "ä\\".py":\t12\n\x01 in \U0001f600'
    draft.add_range(title)
    draft.add_callback(0, [x], [out])
    plan = draft.seal(1, 0, 0, [out])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        plan.run(Binding(plan, Guard([]), {}, {}), [torch.zeros(1)])
    assert title in {event.name for event in profiler.events()}


def test_kinds_of_values_are_known_to_cpp() -> None:
    """Each is read, and a plan of it is built."""
    for kind in ValueKind:
        spec = TensorSpec((1,), "float32", (1,), CPU)
        values = [PlanValue(ValueKind.FRESH, 0, spec), PlanValue(kind, 0, spec)]
        Plan(PlanDescription(values, (), 1, 1, (), {CPU: 64}))


@pytest.mark.parametrize("dtype", [d for d in vars(torch).values() if isinstance(d, torch.dtype)], ids=str)
def test_dtypes_are_known_to_cpp(dtype: torch.dtype) -> None:
    """Each that the stable ABI of torch 2.11 has: all but quantized ones, integers and bits of no whole bytes, and bcomplex32."""
    name = str(dtype).removeprefix("torch.")
    described = replace(EMPTY, values=(PlanValue(ValueKind.FRESH, 0, TensorSpec((1,), name, (1,), CPU)),))
    if name.startswith(("q", "bits", "bcomplex")) or name.removeprefix("u") in {f"int{bits}" for bits in range(1, 8)}:
        with pytest.raises(HybridError, match=f'plans know no dtype "{name}"'):
            Plan(described)
    else:
        Plan(described)
