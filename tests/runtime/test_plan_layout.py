"""How programs become the values, steps and arenas of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import (
    NULL,
    Callback,
    DeviceLaunch,
    ExternalCall,
    KernelCall,
    OperatorCall,
    Program,
    ScalarArgument,
    TensorArgument,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.plan_layout import Piece, StaticLayout, StaticLayoutError, lay_out
from torch_hybrid_backend.sizes.size import symbol

CUDA = Device("cuda", 1)


def _row(elements: int, device: Device = CPU) -> TensorSpec:
    return TensorSpec((elements,), "float32", (1,), device)


def _piece(program: Program) -> Piece:
    """The program as a segment from x, and y where it reads that, to the values named after its outputs."""
    inputs = ("x", "y")[: len(program.inputs)]
    outputs = tuple(f"out{i}" for i in range(len(program.outputs)))
    specs = [tuple(program.buffers[b] for b in buffers) for buffers in (program.inputs, program.outputs)]
    return Piece(inputs, specs[0], outputs, specs[1], program)


def _laid_out(*programs: Program) -> StaticLayout:
    last = _piece(programs[-1])
    return lay_out(frozenset({"x", "y"}), frozenset(), [_piece(program) for program in programs], last.outputs)


def launch(module: str, arguments: Sequence[int], scratch: Sequence[int] = ()) -> DeviceLaunch:
    return DeviceLaunch(module, "kernel", tuple(arguments), 1, (1, 1, 1), 128, scratch=tuple(scratch))


def test_each_device_has_an_arena_of_its_own() -> None:
    """Offsets on a GPU are multiples of 256, on the host of 64; a step runs on its program's device."""
    host = Program(
        (_row(3), _row(3), _row(3), _row(3)),
        (0,),
        (3,),
        (),
        tuple(KernelCall("a.so", "double", pair, 1) for pair in ((0, 1), (1, 2), (2, 3))),
    )
    gpu = Program(
        tuple(_row(3, CUDA) for _ in range(4)),
        (0,),
        (3,),
        (),
        tuple(launch("a.cubin", pair) for pair in ((0, 1), (1, 2), (2, 3))),
        device=CUDA,
    )
    first = _piece(host)
    second = replace(_piece(gpu), inputs=("y",), outputs=("elsewhere",))
    layout = lay_out(frozenset({"x", "y"}), frozenset(), [first, second], ["out0", "elsewhere"])
    assert layout.arenas == {CPU: 128, CUDA: 512}
    places = {(v.spec.device, v.payload) for v in layout.values if v.kind is ValueKind.ARENA}
    assert places == {(CPU, 0), (CPU, 64), (CUDA, 0), (CUDA, 256)}
    assert [step.device for step in layout.steps] == [CPU] * 3 + [CUDA] * 3
    assert layout.from_programs == (0, 1, 2, 3, 4, 5)


def test_scratch_lives_as_long_as_its_launch() -> None:
    """It is a buffer of the arena that later launches use again; a null pointer stays one."""
    program = Program(
        tuple(_row(n, CUDA) for n in (8, 64, 8, 64, 8)),
        (0,),
        (4,),
        (),
        (launch("a.cubin", (0, 2), (1, NULL)), launch("a.cubin", (2, 4), (NULL, 3))),
        device=CUDA,
    )
    layout = _laid_out(program)
    assert layout.arenas == {CUDA: 512}
    first, second = (planned.step for planned in layout.steps)
    assert isinstance(first, DeviceLaunch)
    assert isinstance(second, DeviceLaunch)
    assert first.scratch[1] == second.scratch[0] == NULL
    assert layout.values[first.scratch[0]].payload == layout.values[second.scratch[1]].payload


def test_numbers_on_the_host_enter_a_launch_by_value() -> None:
    """A tensor of no dimensions on the CPU is an argument of a launch like others; it needs no memory on the device."""
    number = TensorSpec((), "float32", (), CPU)
    program = Program(
        (_row(8, CUDA), number, _row(8, CUDA)), (0, 1), (2,), (), (launch("a.cubin", (0, 1, 2)),), device=CUDA
    )
    layout = _laid_out(program)
    assert not layout.arenas
    assert [v.kind for v in layout.values] == [ValueKind.INPUT, ValueKind.INPUT, ValueKind.FRESH]


def test_sizes_enter_grids_and_scalars() -> None:
    """A launch's grid and numbers follow the sizes of a call; before they are known it has no plan."""
    n = symbol("n", 8)
    step = DeviceLaunch(
        "a.cubin", "kernel", (0, 1), 1, (n, 2, 1), 128, (ScalarArgument("int32", 4 * n), ScalarArgument("float32", 0.5))
    )
    program = Program((_row(8, CUDA), _row(8, CUDA)), (0,), (1,), (), (step,), device=CUDA)
    with pytest.raises(StaticLayoutError, match="sizes known only at run time"):
        _laid_out(program)
    described = _laid_out(program.at({"n": 6})).steps[0].step.describe()
    assert (described["grid"], described["scalars"]) == ((6, 2, 1), [("int32", 24), ("float32", 0.5)])


def test_what_only_python_runs_is_a_callback_of_its_own() -> None:
    """Operators that C++ cannot call, and runners without a C function, come after the segments' callbacks; they read tensors."""

    class Runner:
        native = None

        def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
            tensors[1].copy_(tensors[0])

    program = Program(
        (_row(3), _row(3), _row(3), _row(3)),
        (0,),
        (3,),
        (),
        (
            KernelCall("a.so", "double", (0, 1), 1),
            OperatorCall("aten::add", (TensorArgument(1), TensorArgument(1), 2), (2,), "", "Tensor"),
            ExternalCall(Runner(), (2, 3), 1, "copy"),
        ),
    )
    layout = _laid_out(program, program)
    steps = [planned.step for planned in layout.steps]
    assert [step.function for step in steps if isinstance(step, Callback)] == [2, 3, 4, 5]
    assert len(layout.functions) == 4
    assert layout.from_programs == tuple(range(6))
    assert not layout.arenas
    x = torch.ones(3)
    [added] = layout.functions[0]([x, x])
    assert added.tolist() == [3.0] * 3


def test_what_an_operator_takes_as_it_is_keeps_its_form() -> None:
    """A kernel's result that an operator reads in its own strides is not turned into the output's: the output is a view of it."""
    square, flat = TensorSpec((2, 2), "float32", (2, 1), CPU), _row(4)
    program = Program(
        (flat, flat, flat),
        (0,),
        (1, 2),
        (),
        (KernelCall("a.so", "double", (0, 1), 1), OperatorCall("aten::abs", (TensorArgument(1),), (2,), "")),
    )
    piece = Piece(("x",), (flat,), ("a", "b"), (square, flat), program)
    layout = lay_out(frozenset({"x"}), frozenset(), [piece], ["a", "b"])
    [read] = layout.steps[1].step.tensors
    assert layout.values[read.buffer].spec == flat
    assert layout.values[layout.outputs[0]].kind is ValueKind.ALIAS


def test_an_output_that_nothing_writes_is_refused() -> None:
    """The program contradicts itself."""
    with pytest.raises(HybridError, match="no kernel writes out0"):
        _laid_out(Program((_row(3), _row(3)), (0,), (1,), (), ()))
