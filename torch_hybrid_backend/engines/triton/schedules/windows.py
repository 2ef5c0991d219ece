"""The windows of a convolution: which elements of the image and of the weight a point of the result adds up.

Of a transposed one, a point p adds up those taps k of which (p + padding - k * dilation) / stride is a whole number, the place in the image.
Its phase, p modulo the stride, decides which these are. Points of one phase have the same taps, and neighbours among them read neighbours of
the image, as in a convolution of stride 1. So a program has points of one phase, and visits their taps alone: no more is multiplied than has
to be, the result is written once, with what is fused behind it, and the programs of all phases are one launch. Of the other ways, with a
stride s and a kernel of K elements in each of d dimensions,

- an ordinary convolution over the image with zeros between its elements multiplies s**d times as much;
- one whose channels are those of all phases (Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016) multiplies
  (ceil(K / s) * s / K)**d times as much, 1.8 for 3x3 and stride 2. It computes points that padding cuts off, too, so that its result is
  moved to its place by one more pass over memory;
- a launch for each phase does what this does, in s**d launches, each of so many times fewer programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch_hybrid_backend.engines.triton.printer import Printer, Value
from torch_hybrid_backend.engines.triton.schedules.tiles import flattened, program_start
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Const, Expr
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.loops.ops import index_in
from torch_hybrid_backend.sizes.size import Dim, ceil_div, known_int, product, symbol, symbols

Env = Mapping[LoopVar, Index]


class Windows:
    """The windows of a kernel's points.

    `points`: what the rows of a tile run over, the batch and the spatial dimensions of the result, or of one of its `phases`. `taps`: what
    there is to add up, one variable for each spatial dimension. With `counted` their extents are what the phase has, found out by the
    program; else as many as any phase has, and tests leave out what is no tap.
    """

    def __init__(self, kernel: ConvKernel, *, counted: bool = False) -> None:
        self._kernel = kernel
        n, _, *out = kernel.domain
        axes = _Phases if kernel.transposed else _Axis
        self._axes = [axes(kernel, d, is_counted=counted) for d in range(len(out))]
        self.points = (n, *(LoopVar(v.name, axis.places) for v, axis in zip(out, self._axes, strict=True)))
        self.phases = tuple(axis.phase for axis in self._axes if axis.phase is not None)
        self.taps = tuple(axis.tap for axis in self._axes)

    @property
    def rows(self) -> Dim:
        """The number of points of one phase."""
        return product([v.extent for v in self.points])

    @property
    def phase_count(self) -> int:
        return known_int(product([v.extent for v in self.phases]))

    def begin(self, printer: Printer) -> str:
        """Has the program find out which phase its points are of, and what they have in common. Gives the number of its tile, "" where that is
        its own. Neighbours have the phases of one tile: together they write whole lines of memory, while these are in the cache."""
        if self.phase_count == 1:
            number, phases = "", dict[LoopVar, Index]()
        else:
            phase, phases = flattened(self.phases, "phase")
            number = f"{program_start(printer)} // {self.phase_count}"
            printer.lines.add(f"phase = {program_start(printer)} % {self.phase_count}")
            printer.variable(phase, Value("phase"))
        for axis in self._axes:
            axis.begin(printer, phases)
        return number

    def result(self, points: Env) -> tuple[dict[LoopVar, Index], list[Expr]]:
        """The image and the place in the result, by the kernel's variables, and what has to hold for it to exist."""
        n, *places = (points[variable] for variable in self.points)
        _, _, *out = self._kernel.domain
        found = [axis.result(place) for axis, place in zip(self._axes, places, strict=True)]
        tests = [index_in(index, 0, v.extent) for index, v in zip(found, out, strict=True)]
        return dict(zip((self._kernel.domain[0], *out), (n, *found), strict=True)), _undecided(tests)

    def image(self, points: Env, taps: Env) -> tuple[list[Index], list[Expr]]:
        """The place in the image along each spatial dimension, and what has to hold for it to be there and to be added up."""
        places = [axis.image(points[v], taps[axis.tap]) for axis, v in zip(self._axes, self.points[1:], strict=True)]
        inside = [index_in(index, 0, v.extent) for index, v in zip(places, self._kernel.x_vars[2:], strict=True)]
        return places, [*self._tap_tests(taps), *_undecided(inside)]

    def weight(self, group: Index, o: Index, c: Index, taps: Env) -> tuple[dict[LoopVar, Index], list[Expr]]:
        """The place in the weight, by the kernel's variables, and what has to hold for it to be there. o, c: a channel of the group's result,
        and of its image."""
        kernel = self._kernel
        places = [axis.window(taps[axis.tap]) for axis in self._axes]
        if kernel.transposed:
            first, second = group * in_channels(kernel) + c, o
        else:
            first, second = group * out_channels(kernel) + o, c
        return dict(zip(kernel.w_vars, (first, second, *places), strict=True)), self._tap_tests(taps)

    def _tap_tests(self, taps: Env) -> list[Expr]:
        return _undecided([test for axis in self._axes for test in axis.tests(taps[axis.tap])])


class _Axis:
    """A spatial dimension of an ordinary convolution."""

    def __init__(self, kernel: ConvKernel, d: int, *, is_counted: bool) -> None:
        self.dim = d
        self.stride, self.padding, self.dilation = kernel.stride[d], kernel.padding[d], kernel.dilation[d]
        self.kernel = known_int(kernel.w_vars[2 + d].extent)
        self.places: Dim = kernel.domain[2 + d].extent
        self.phase: LoopVar | None = None
        self.is_counted = is_counted
        self.tap = LoopVar(f"tap{d}", self.kernel)

    def begin(self, printer: Printer, phases: Env) -> None:
        return

    def result(self, place: Index) -> Index:
        return place

    def image(self, place: Index, tap: Index) -> Index:
        return place * self.stride - self.padding + tap * self.dilation

    def window(self, tap: Index) -> Index:
        return tap

    def tests(self, tap: Index) -> list[Expr]:
        return []


class _Phases(_Axis):
    """A spatial dimension of a transposed convolution.

    With u = phase + padding, a phase has the taps k for which u - k * dilation is a multiple of the stride: from the first one on, every
    `step`-th; none where u is no multiple of what stride and dilation have in common.
    """

    def __init__(self, kernel: ConvKernel, d: int, *, is_counted: bool) -> None:
        super().__init__(kernel, d, is_counted=is_counted)
        self.places = ceil_div(self.places, self.stride)
        self.common = math.gcd(self.stride, self.dilation)
        self.step = self.stride // self.common
        # Everywhere the same number of taps: nothing is to be found out, or tested.
        self.is_even = self.kernel % self.step == 0 and self.common == 1
        most = -(-self.kernel // self.step)
        if self.stride > 1:
            self.phase = LoopVar(f"phase{d}", self.stride)
        if is_counted and not self.is_even:
            self.tap = LoopVar(f"tap{d}", symbol(f"taps{d}", most))
        else:
            self.tap = LoopVar(f"tap{d}", most)
        self._u = self._first = self._shift = as_index(0)

    def begin(self, printer: Printer, phases: Env) -> None:
        phase = as_index(0) if self.phase is None else _named(printer, f"phase{self.dim}", phases[self.phase])
        self._u = u = phase + self.padding
        inverse = pow(self.dilation // self.common, -1, self.step)
        self._first = _named(printer, f"first{self.dim}", u // self.common * inverse % self.step)
        # (u - first * dilation) / stride, by a quotient of what is never negative: others differ between Python and a GPU.
        quotient = (u + self._first * (-self.dilation % self.stride)) // self.stride
        self._shift = _named(printer, f"shift{self.dim}", quotient) - self._first * ceil_div(self.dilation, self.stride)
        if self.is_counted and not self.is_even:
            least, rest = divmod(self.kernel, self.step)
            count = (
                f"tl.where({printer.index(self._first).text} < {rest}, {least + 1}, {least})" if rest else str(least)
            )
            if self.common > 1:
                count = f"tl.where({printer.index(u % self.common).text} == 0, {count}, 0)"
            (taps,) = symbols([self.tap.extent])
            printer.count(taps, count)

    def result(self, place: Index) -> Index:
        return place * self.stride + self._u - self.padding

    def image(self, place: Index, tap: Index) -> Index:
        return place + self._shift - tap * (self.dilation // self.common)

    def window(self, tap: Index) -> Index:
        return self._first + tap * self.step

    def tests(self, tap: Index) -> list[Expr]:
        if self.is_counted:
            return []
        return [index_in(self.window(tap), 0, self.kernel), index_in(self._u % self.common, 0, 1)]


def _named(printer: Printer, name: str, index: Index) -> Index:
    """A variable of the program's that holds an index, which is never negative and the same for all its points."""
    if index.is_const:
        return index
    variable = LoopVar(name, index.high + 1)
    printer.lines.add(f"{name} = {printer.index(index).text}")
    printer.variable(variable, Value(name))
    return index_of(variable)


def _undecided(tests: Sequence[Expr]) -> list[Expr]:
    """Those that do not hold everywhere. One that holds nowhere is left: a window may lie in the padding as a whole."""
    return [test for test in tests if not (isinstance(test, Const) and test.value)]


def in_channels(kernel: ConvKernel) -> int:
    """Channels of one group of the image."""
    return known_int(kernel.x_vars[1].extent) // kernel.groups


def out_channels(kernel: ConvKernel) -> int:
    """Channels of one group of the result."""
    return known_int(kernel.domain[1].extent) // kernel.groups


def taps_of(kernel: ConvKernel) -> int:
    """The number of elements of a window."""
    return known_int(product([v.extent for v in kernel.w_vars[2:]]))
