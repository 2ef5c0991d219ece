"""The description of a plan: what is written in Python is what C++ reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.plans import Draft
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import DeviceLaunch, KernelCall, LaunchGraph, ScalarArgument, Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.native import description
from torch_hybrid_backend.runtime.native.description import (
    Life,
    PlanDescription,
    PlanStep,
    PlanValue,
    ValueKind,
    expression,
    span,
)
from torch_hybrid_backend.runtime.native.ops import Binding, Guard, Plan, SizeTable
from torch_hybrid_backend.sizes.size import Dim, evaluate, function, symbol

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

    with pytest.raises(
        HybridError, match=r'no kind of step is called "dance": it must be one of kernel, operator, copy, check'
    ):
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


ROWS, COLUMNS = symbol("s0", 4, -100, 100), symbol("s1", 4, -100, 100)


def test_sizes_known_only_at_run_time_are_expressions() -> None:
    """Each once, wherever it stands; with what C++ plans memory by."""
    values = [
        PlanValue(ValueKind.INPUT, 0, TensorSpec((ROWS, 8), "float32", (8, 1), CPU)),
        PlanValue(ValueKind.ARENA, 0, TensorSpec((8 * ROWS,), "float32", (1,), CPU)),
        PlanValue(ValueKind.ALIAS, 1, TensorSpec((ROWS,), "float32", (8,), CPU), ROWS // COLUMNS),
    ]
    steps = [PlanStep(KernelCall("a.so", "double", (0, 1), 1, (ROWS, 8 * ROWS)))]
    lives = {CPU: [Life(1, 0, 0)]}
    described = PlanDescription(values, steps, 1, 0, (), {CPU: 0}, lives=lives, symbols=("s1", "s0"))
    read = json.loads(described.text(lambda member, path: path))
    rows, all_of_it, offset = {"size": 0}, {"size": 1}, {"size": 2}
    assert [value[3:] for value in read["values"]] == [
        [[rows, 8], [8, 1], "cpu"],
        [[all_of_it], [1], "cpu"],
        [[rows], [8], "cpu", offset],
    ]
    assert read["steps"][0]["sizes"] == [rows, all_of_it]
    assert read["sizes"] == ["s0", ["*", "s0", 8], ["//", "s0", "s1"]]
    assert (read["symbols"], read["lives"], read["arenas"]) == (["s1", "s0"], [[[1, 0, 0]]], [["cpu", 0]])


def test_what_is_no_size_is_refused() -> None:
    """A description is numbers and texts."""
    value = PlanValue(ValueKind.FRESH, 0, TensorSpec((ROWS, 1j), "float32", (1, 1), CPU))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot have 1j"):
        PlanDescription([value], (), 0, 0, (), {}, symbols=("s0",)).text(lambda member, path: path)


_sizes: st.SearchStrategy[Dim] = st.recursive(
    st.one_of(st.integers(-9, 9), st.just(ROWS), st.just(COLUMNS)),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(function, st.sampled_from(["floordiv", "mod", "max", "min"]), inner, inner).filter(
            lambda made: made is not None
        ),
    ),
    max_leaves=6,
)


def _defined(build: st.DataObject) -> Dim:
    try:
        return build.draw(_sizes)  # type: ignore[no-any-return]
    except ZeroDivisionError:  # of two numbers: no size
        return ROWS


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(-100, 100), st.integers(-100, 100))
def test_cpp_computes_sizes_as_python_does(data: st.DataObject, rows: int, columns: int) -> None:
    """Quotients and remainders are rounded as in Python, and 0 where the divisor is 0."""
    size = _defined(data)
    table = SizeTable(("s0", "s1"), [expression(size), expression(size + 1)])
    value = evaluate(size, {"s0": rows, "s1": columns})
    assert table.at((rows, columns)) == [value, value + 1]


@pytest.mark.parametrize("sizes", [(), (4,), (4, 1), (0, 5), (5, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("stride", [0, 1, 7])
def test_spans_are_those_of_tensors(sizes: tuple[int, ...], stride: int) -> None:
    """From the first element to the last; none where a dimension is empty."""
    spec = TensorSpec(sizes, "float32", tuple(stride + n for n in range(len(sizes))), CPU)
    assert SizeTable((), [span(spec)]).at(()) == [spec.span]


def test_sizes_of_more_than_64_bits_are_errors() -> None:
    """Nothing wraps around."""
    for size in (ROWS * COLUMNS, ROWS + COLUMNS, (ROWS * -1) // COLUMNS):
        table = SizeTable(("s0", "s1"), [expression(size)])
        table.at((3, 4))
        with pytest.raises(HybridError, match="does not fit in 64 bits"):
            table.at(((1 << 63) - 1, 2) if "//" not in str(size) else (-(1 << 63), 1))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        (["s2"], 'depends on "s2", which is no symbol'),
        ([["^", "s0", 2]], 'no operation "\\^" of 2 operands'),
        ([["%", "s0"]], 'no operation "%" of 1 operands'),
        ([["span", ["s0"], []]], "one stride for each size"),
        ([{}], "a whole number"),
    ],
)
def test_what_is_no_expression_is_refused(sizes: list[Any], error: str) -> None:
    """The error comes when the table is made."""
    with pytest.raises(HybridError, match=error):
        SizeTable(("s0", "s1"), sizes)
