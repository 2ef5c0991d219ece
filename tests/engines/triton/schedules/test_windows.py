"""Places of taps in the image and in the weight, and which tests are left to a program."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from torch_hybrid_backend.engines.triton.printer import Printer, Value
from torch_hybrid_backend.engines.triton.schedules.windows import Windows
from torch_hybrid_backend.engines.triton.source import Lines
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Const, Expr
from torch_hybrid_backend.loops.kernels import ConvKernel


def _kernel(
    stride: int, padding: int, dilation: int, kernel: int, result: int, size: int = 9, *, transposed: bool = False
) -> ConvKernel:
    """Along one dimension, of three channels."""
    domain, x_vars, w_vars = (
        tuple(LoopVar(f"{name}{d}", n) for d, n in enumerate(shape))
        for name, shape in (("i", (1, 3, result)), ("x", (1, 3, size)), ("w", (3, 3, kernel)))
    )
    nothing, accumulator = Const("float32", 0.0), Buffer((1, 3, result), "float32")
    geometry = ((stride,), (padding,), (dilation,), 1)
    return ConvKernel(
        (), (), domain, x_vars, nothing, w_vars, nothing, *geometry, accumulator, (), transposed=transposed
    )


def test_places() -> None:
    """Stride, padding and dilation; without padding everything is inside, and nothing is tested."""

    def window(*geometry: int) -> tuple[str, int]:
        windows = Windows(_kernel(*geometry))
        points, taps = ({v: index_of(v) for v in variables} for variables in (windows.points, windows.taps))
        (place,), tests = windows.image(points, taps)
        assert windows.result(points) == ({v: points[v] for v in windows.points}, [])
        return repr(place), len(tests)

    assert window(2, 0, 2, 3, 3) == ("i2*2 + tap0*2", 0)
    assert window(1, 1, 1, 3, 9) == ("i2 + tap0 + -1", 1)
    assert window(1, 0, 1, 1, 9) == ("i2", 0)


@pytest.mark.parametrize("counted", [True, False])
def test_phases(counted: bool) -> None:
    """A program of a transposed convolution adds up exactly the pairs of a point and a tap that meet in the image; counted, it visits no tap
    that does not belong to the phase of its points. Shown for strides, paddings, dilations and kernels up to some size."""
    settings = itertools.product((1, 2, 3, 4, 6), (0, 1, 3), (1, 2, 3, 4, 6), (1, 2, 3, 5))
    for stride, padding, dilation, kernel in settings:
        result = 4 * stride - 2 * padding + dilation * (kernel - 1) + max(stride, dilation)
        if result < 1:
            continue
        own = _kernel(stride, padding, dilation, kernel, result, 5, transposed=True)
        visited, idle = _visited(Windows(own, counted=counted), kernel)
        wanted = {
            (point, tap, (point + padding - tap * dilation) // stride)
            for point, tap in itertools.product(range(result), range(kernel))
            if (point + padding - tap * dilation) % stride == 0
            and 0 <= (point + padding - tap * dilation) // stride < 5
        }
        assert sorted(visited) == sorted(wanted), (stride, padding, dilation, kernel)
        assert not (counted and idle)


def _visited(windows: Windows, kernel: int) -> tuple[list[tuple[int, ...]], int]:
    """Point, tap and place of everything that is added up, by the text of the program; and how many taps are tested in vain."""
    visited, idle = [], 0
    (n, point), (tap,) = windows.points, windows.taps
    env = {v: index_of(v) for v in (n, point, tap)}
    for phase in range(windows.phase_count):
        printer = Printer(Lines(), (), (), {})
        for variable in (point, tap):
            printer.variable(variable, Value(variable.name))
        windows.begin(printer)
        found, exists = windows.result(env)
        (pixel,), inside = windows.image(env, env)
        weight, is_tap = windows.weight(env[n], env[n], env[n], env)
        places = [printer.index(index).text for index in ([*found.values()][1], [*weight.values()][2], pixel)]
        names = {"tl": SimpleNamespace(where=lambda test, a, b: a if test else b, program_id=[phase].__getitem__)}
        _run(printer.lines, names)
        for values in itertools.product(range(int(point.extent)), range(eval(printer.size(tap.extent), names))):
            names |= dict(zip((point.name, tap.name), values, strict=True))
            where = tuple(eval(place, names) for place in places)
            if not _holds(exists, printer, names):
                continue
            if _holds(is_tap, printer, names):
                assert where[1] in range(kernel)
                visited += [where] * _holds(inside, printer, names)
            else:
                idle += 1
                assert not _holds(inside, printer, names)
    return visited, idle


def _holds(tests: list[Expr], printer: Printer, names: dict[str, object]) -> bool:
    """True if comparisons of indices hold."""
    values = []
    printer.lines = Lines()
    with printer.over(printer.tile, {}, {}):
        values = [printer.expr(test).text for test in tests]
    _run(printer.lines, names)
    return all(names[value] for value in values)


def _run(lines: Lines, names: dict[str, object]) -> None:
    exec("\n".join(line.strip() for line in lines.text.splitlines()), names)
