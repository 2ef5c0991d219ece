"""Programs and their steps as data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import (
    NULL,
    Callback,
    Check,
    Copy,
    DeviceLaunch,
    ExternalCall,
    KernelCall,
    LaunchGraph,
    OperatorCall,
    PackedConstant,
    Program,
    ScalarArgument,
    Step,
    TensorArgument,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.sizes.size import symbol, symbols

T = TensorArgument
N = symbol("n", 8)
ROW = TensorSpec((N,), "float32", (1,), CPU)


class Native:
    """A runner with a C function, which is never called here."""

    native = (1, 2)

    def __call__(self, tensors: object) -> None:
        raise AssertionError


def _launch(read: int, written: int, scratch: tuple[int, ...] = ()) -> DeviceLaunch:
    return DeviceLaunch("a.cubin", "add", (read, written), 1, (N, 1, 1), 32, scratch=scratch)


STEPS: list[tuple[Step, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    # A step, and its buffers: addressed, read as tensors, returned.
    (KernelCall("a.so", "add", (3, 4, 3), 1, (N,)), (3, 4, 3), (), ()),
    (
        DeviceLaunch("a.cubin", "add", (3, 4), 1, (N, 1, 1), 32, (ScalarArgument("int32", N),), 0, (-1, 5)),
        (3, 4, 5),
        (),
        (),
    ),
    (LaunchGraph((_launch(3, 4), _launch(4, 5))), (3, 4, 4, 5), (), ()),
    (OperatorCall("aten::cat", ((T(3), T(4), T(3)), 0), (5,), ""), (), (3, 4, 3), (5,)),
    (OperatorCall("aten::topk", (T(3), 2, -1, True, True), (None, 4), ""), (), (3,), (4,)),
    (OperatorCall("aten::split", (T(3), 2, 0), ((4, None, 5),), "", "Tensor"), (), (3,), (4, 5)),
    (ExternalCall(Native(), (3, 4), 1, "engine"), (3, 4), (), ()),
    (Callback(0, (3, 4), (5,)), (), (3, 4), (5,)),
    (Copy(3, 4), (), (3, 4), ()),
    (Check((3, 4)), (3, 4), (), ()),
]


@pytest.mark.parametrize(("step", "memory", "tensors", "returned"), STEPS, ids=lambda each: type(each).__name__)
def test_steps_say_what_they_touch(
    step: Step, memory: tuple[int, ...], tensors: tuple[int, ...], returned: tuple[int, ...]
) -> None:
    """Steps answer the runtime's questions; over other numbers they touch those, and what is described of them is JSON."""
    assert (step.memory, tuple(t.buffer for t in step.tensors), step.returned) == (memory, tensors, returned)
    moved = step.at({"n": 6}).over(lambda buffer: buffer + 10, lambda tensor: tensor.buffer + 20)
    assert moved.memory == tuple(buffer + 10 for buffer in memory)
    assert tuple(t.buffer for t in moved.tensors) == tuple(buffer + 20 for buffer in tensors)
    assert moved.returned == tuple(buffer + 10 for buffer in returned)
    assert not symbols(moved.sizes_used)
    assert json.loads(json.dumps(moved.describe()))["kind"] in {
        "kernel",
        "launch",
        "operator",
        "external",
        "callback",
        "copy",
        "check",
        "graph",
    }


def test_a_launch_may_write_its_scratch_memory() -> None:
    """Scratch memory is the last of a launch's arguments; a graph says it of each of its launches."""
    launches = (_launch(3, 4, (NULL, 5)), replace(_launch(3, 4), writes=0))
    assert [launch.written for launch in launches] == [(4, 5), ()]
    assert LaunchGraph(launches).at({"n": 6}).describe()["writes"] == [(4, 5), ()]


def test_sizes_are_those_of_buffers_and_steps() -> None:
    """Wherever a size known only at run time stands; with values there is none left."""
    m, k = symbol("m", 2), symbol("k", 3)
    steps = (
        KernelCall("a.so", "f", (0, 1), 1, (m,)),
        DeviceLaunch("a.cubin", "f", (0, 1), 1, (1, k, 1), 32, (ScalarArgument("float32", 0.5),)),
    )
    program = Program((ROW, ROW), (0,), (1,), (), steps)
    assert {s.name for s in symbols(program.sizes_used)} == {"n", "m", "k"}
    concrete = program.at({"n": 4, "m": 5, "k": 6})
    assert not symbols(concrete.sizes_used)
    assert concrete.buffers[0].shape == (4,)
    assert concrete.device == CPU
    with pytest.raises(KeyError):
        program.at({"n": 4})


def test_a_program_serves_its_ranges() -> None:
    """Both ends of each of them; every size where it has none, at any values that it was made for."""
    every = Program((ROW,), (0,), (0,), (), (), (ROW,))
    ranged = replace(every, ranges=(("n", 2, 8), ("m", 1, 4)))
    assert every.serves({"n": 1000})
    assert [ranged.serves({"n": n, "m": m}) for n, m in ((2, 1), (8, 4), (1, 1), (9, 1), (8, 5))] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert ranged.at({"n": 4, "m": 1}).ranges == ranged.reading([0]).ranges == ranged.ranges


def test_a_program_without_some_inputs() -> None:
    """Inputs that nothing reads go; what is packed keeps its sources."""
    pack = PackedConstant(1, (2,), torch.Tensor.flatten)
    program = Program((ROW, ROW), (0, -1, -1), (1,), (pack,), (), (ROW, N, ROW))
    kept = program.reading([0, 2])
    assert kept.inputs == (0, -1)
    assert kept.signature == (ROW, ROW)
    assert kept.constants[0].sources == (1,)


def test_a_program_serves_what_its_kernels_rely_on() -> None:
    """Its symbols' ranges, what is counted in 32 bits, and positions that lie in their tensor."""
    n = symbol("n", 4, 2, 1 << 40)
    program = Program(
        (TensorSpec((8,), "float32", (1,), CPU),), (0,), (0,), (), (), (n,), counts=(n * n,), relied_on=(100_000 - n,)
    )
    assert program.names == ("n",)
    assert [program.serves({"n": value}) for value in (1, 2, 40_000, 60_000, 1 << 41)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert "2500000000" not in program.unserved({"n": 40_000})
    assert "3600000000" in program.unserved({"n": 60_000})
    assert "outside of its tensor" in replace(program, counts=()).unserved({"n": 100_001})


def test_numbers_of_an_operator_may_be_sizes() -> None:
    """Those in lists too; at known sizes they are numbers."""
    call = OperatorCall("aten::split_with_sizes", (T(0), (2, N - 2), 0), ((1, 2),), "")
    assert [each.name for each in symbols(call.sizes_used)] == ["n"]
    assert call.at({"n": 7}).arguments == (T(0), (2, 5), 0)
    assert call.describe()["arguments"][1] == ["list", [["int", 2], ["int", N - 2]]]
