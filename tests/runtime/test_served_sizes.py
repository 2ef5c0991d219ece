"""The sizes that programs serve, as `Program.serves` tells them one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.limits import MAX_ELEMENTS
from torch_hybrid_backend.core.program import KernelCall, Program
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.runtime.served_sizes import ServedSizes
from torch_hybrid_backend.sizes.size import MAX_INTEGER, Dim, symbol

ROWS, COLUMNS = symbol("s0"), symbol("s1")
COUNT = symbol("s2", 4, -MAX_INTEGER - 1, MAX_INTEGER)


def _program(*shape: Dim) -> Program:
    strides = [1, *shape[:0:-1]]
    spec = TensorSpec(shape, "float32", tuple(reversed(strides)), CPU)
    return Program((spec, spec), (0,), (1,), (), (KernelCall("a.so", "double", (0, 1), 1, (ROWS,)),), (spec,))


PROGRAMS = [
    _program(ROWS, COLUMNS),
    _program(ROWS, 8),
    replace(_program(ROWS, 8), ranges=(("s0", 2, 64),)),
    replace(_program(ROWS, COLUMNS), counts=(ROWS * ROWS * 3, COLUMNS)),
    replace(_program(ROWS, COLUMNS), relied_on=(ROWS - COUNT - 1, COUNT)),
    _program(3, 4),
]
MOST = MAX_ELEMENTS // 8


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 64, 65, 40_000, MOST, MOST + 1, MAX_ELEMENTS])
@pytest.mark.parametrize("columns", [0, 1, 7, MAX_ELEMENTS])
@pytest.mark.parametrize("count", [-1, 0, 3, 1 << 40])
def test_programs_serve_what_they_say(rows: int, columns: int, count: int) -> None:
    """Ranges of symbols, elements of buffers (none where a dimension is empty), what is counted, and what is not negative."""
    values = {"s0": rows, "s1": columns, "s2": count}
    served = ServedSizes(PROGRAMS, ("s2", "s0", "s1")).at((count, rows, columns))
    assert served == [program.serves(values) for program in PROGRAMS]


def test_counts_beyond_64_bits_are_served_by_none_that_has_them() -> None:
    """Other programs serve the sizes."""
    served = ServedSizes([replace(PROGRAMS[0], counts=(COUNT * COUNT,)), PROGRAMS[1]], ("s0", "s1", "s2"))
    assert served.at((3, 3, 2)) == [True, True]
    assert served.at((3, 3, 1 << 40)) == [False, True]


def test_programs_of_known_sizes_serve_any() -> None:
    """There is nothing to look at."""
    assert ServedSizes([_of_known_sizes()], ()).at(()) == [True]


def _of_known_sizes() -> Program:
    program = _program(3, 4)
    return replace(program, steps=(KernelCall("a.so", "double", (0, 1), 1),))


def test_sizes_that_depend_on_data_are_refused() -> None:
    """Nobody could tell them from a call's inputs."""
    with pytest.raises(StaticLayoutError, match="the sizes s1 depend on data"):
        ServedSizes(PROGRAMS[:1], ("s0",))
