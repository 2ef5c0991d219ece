"""The state of a program while it is generated: it is executed line by line, and a line that leads nowhere is taken back.

Four executions go on at once:

- `eager`, the program as written;
- `wide`, in float64: the truth;
- `noisy`, in float64 with an error of a few units in the last place of the program's dtypes added to every inexact result: what an
  answer as careful as eager's may look like. The spread between noisy and wide is how far errors have grown, whoever computes;
- the static knowledge whether a value is *exact*: a small multiple of 1/256, made by operations that round nothing in any order. Only exact
  values are compared, rounded, made integers or searched for positions, for there an error of one unit may change everything.

Other values may be quantized: next to all of their elements lie so far from ties that everyone finds the same integers. Where not all do,
all four go on with eager's, so that the spread stays that of rounding. What follows is *unsteady*: the check allows there what the other side
of a tie makes of it, and such values are quantized again only where that changes no integer.

Lines are taken back whose values become infinite, NaN, large or too inexact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.random_programs.draw import Draw
from tests.random_programs.noise import LARGEST_EXACT, MOVE, QUANTISE, REDUCTION, SMOOTH, STEP, SUM, add_noise, on_grid
from tests.random_programs.program import LAYOUTS, Input, Line, Program, namespace, run_lines
from tests.random_programs.quantized import NUDGES, functions

LARGEST = 1000.0
MAX_ELEMENTS = 6000
# Relative to the largest element: a noisier value tells nothing any more.
# The share of integers that may lie beside a tie.
MAX_UNSTEADY = 0.02
MAX_NOISE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.float16: 0.04, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Step:
    """A step that a template proposes. Names of the results are made up by the scope.

    `results`: 0 is a statement, which writes to the first value that it mentions. `writes`: further values that the line writes to.
    """

    expression: str
    kind: str
    results: int = 1
    writes: tuple[str, ...] = ()


class TakenBackError(Exception):
    """A line that an idiom needs leads nowhere. The idiom's lines before it stay."""


@dataclass(frozen=True)
class Value:
    """A value as templates see it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool
    steady: bool = True

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return self.name


class Scope:
    """Values so far, and where choices come from."""

    def __init__(self, draw: Draw, dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> None:
        self.draw = draw
        self.dtypes = dtypes
        self.sizes = sizes
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self._values: dict[str, Value] = {}
        self._eager, self._wide, self._noisy = namespace(False), namespace(True), namespace(True)
        self._noise = torch.Generator().manual_seed(1)
        self._weights: set[str] = set()
        self._read: set[str] = set()

    def values(self, where: Callable[[Value], bool] = lambda _: True) -> list[Value]:
        return [value for value in self._values.values() if where(value)]

    def pick(self, where: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """A value: mostly one that nothing reads yet, so that programs are deep; sometimes any, so that they branch."""
        found = self.values(where)
        if not found:
            return None
        unread = [value for value in found if value.name not in self._read]
        return self.draw.choose(unread if unread and not self.draw.chance(3) else found)

    def is_writable(self, value: Value) -> bool:
        """In no weight's memory, and no two elements in one place: eager writes to some of those, AOTAutograd refuses."""
        tensor = self._eager[value.name]
        if not tensor.numel() or self._weights.intersection(self._sharing(value.name)):
            return False
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        places = torch.arange(span).as_strided(tensor.shape, tensor.stride())
        return int(places.unique().numel()) == tensor.numel()

    def fresh(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        weight: bool = False,
        layout: str = "",
        scale: float = 1.0,
        full: bool = False,
    ) -> Value:
        """A new input. `scale` multiplies its values: a power of two. `full`: integers of all that 8 bits hold."""
        name = f"{'w' if weight else 'x'}{len(self.inputs)}"
        chosen = (
            "contiguous" if weight else layout or (self.draw.choose(LAYOUTS) if self.draw.chance(3) else "contiguous")
        )
        item = Input(name, tuple(shape), dtype, chosen, self.draw.integer(0, 10**6), weight, scale, full=full)
        self.inputs.append(item)
        self._eager[name], self._wide[name], self._noisy[name] = item.tensor(), item.tensor(True), item.tensor(True)
        if weight:
            self._weights.add(name)
        self._values[name] = Value(name, item.shape, dtype, True)
        return self._values[name]

    def apply(self, step: Step) -> bool:
        """Execute a proposal; False where it is taken back."""
        reads = tuple(
            dict.fromkeys(name for name in re.findall(r"\b[xwt]\d+\b", step.expression) if name in self._values)
        )
        targets = tuple(
            f"t{len(self.lines)}" + (f"{'abcdefghij'[i]}" if step.results > 1 else "") for i in range(step.results)
        )
        targets = tuple(self._fresh_name(target) for target in targets)
        line = Line(targets, step.expression, reads, step.kind)
        writes = step.writes if targets else (reads[0], *step.writes)
        # All that share memory with what is written to change.
        written = tuple(dict.fromkeys(other for name in writes for other in self._sharing(name)))
        saved = [
            (s[name].untyped_storage(), s[name].untyped_storage().clone()) for name in writes for s in self._spaces
        ]
        try:
            for space, wide in ((self._eager, False), (self._wide, True), (self._noisy, True)):
                run_lines([line], space, wide)
            values = self._judged(line, step.kind, [self._values[name] for name in reads], (*targets, *written), writes)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            values = None
        if values is None:
            for storage, before in saved:
                storage.copy_(before)
            for target in targets:
                for space in self._spaces:
                    space.pop(target, None)
            return False
        self.lines.append(line)
        self._read.update(reads)
        self._values.update({value.name: value for value in values})
        return True

    def magnitude(self, value: Value) -> float:
        """The largest magnitude in it, or 1 where that is nothing."""
        return float(self._eager[value.name].abs().max()) or 1.0

    @property
    def last(self) -> Value:
        """The first result of the last line."""
        return self._values[self.lines[-1].targets[0]]

    def let(self, expression: str, kind: str, writes: tuple[str, ...] = ()) -> Value:
        """The value of a line of an idiom. Raises TakenBackError."""
        return self.several(expression, kind, 1, writes)[0]

    def several(self, expression: str, kind: str, results: int, writes: tuple[str, ...] = ()) -> list[Value]:
        """The values of a line of an idiom; none of a statement. Raises TakenBackError."""
        if not self.apply(Step(expression, kind, results, writes)):
            raise TakenBackError(expression)
        return [self._values[name] for name in self.lines[-1].targets]

    def _fresh_name(self, name: str) -> str:
        # "t12a" would not match the pattern of names: number results instead.
        match = re.fullmatch(r"t(\d+)([a-j]?)", name)
        assert match is not None
        return f"t{match[1]}" if not match[2] else f"t{match[1]}0{'abcdefghij'.index(match[2])}"

    @property
    def _spaces(self) -> tuple[dict[str, Any], ...]:
        return (self._eager, self._wide, self._noisy)

    def _sharing(self, name: str) -> list[str]:
        storage = self._eager[name].untyped_storage().data_ptr()
        return [other for other in self._values if self._eager[other].untyped_storage().data_ptr() == storage]

    def _judged(
        self, line: Line, kind: str, operands: list[Value], targets: tuple[str, ...], writes: tuple[str, ...]
    ) -> list[Value] | None:
        """The line's results and what else it changed, or None where it must be taken back."""
        exact_operands = all(operand.exact for operand in operands)
        steady = all(operand.steady for operand in operands)
        values = []
        for target in targets:
            eager, wide, noisy = (space[target] for space in self._spaces)
            if not isinstance(eager, torch.Tensor) or eager.numel() > MAX_ELEMENTS or eager.dtype.is_complex:
                return None
            if eager.shape != wide.shape:
                return None
            if kind == QUANTISE:
                differs = self._differing(line, target)
                if float(differs.float().mean()) > (MAX_UNSTEADY if steady else 0.0):
                    return None
                wide.copy_(eager)
                noisy.copy_(eager)
                values.append(Value(target, tuple(eager.shape), eager.dtype, True, steady and not bool(differs.any())))
                continue
            if not eager.dtype.is_floating_point:
                if not torch.equal(eager, wide) or not torch.equal(eager, noisy):
                    return None
                values.append(Value(target, tuple(eager.shape), eager.dtype, True, steady))
                continue
            if wide.dtype is not torch.float64:
                return None
            exact = exact_operands and self._is_exact(eager, wide, kind, operands)
            if kind == STEP and not exact:
                return None
            if not exact and kind != MOVE and target in (*line.targets, *writes):
                add_noise(noisy, eager.dtype, kind, self._noise)
            if not self._is_bounded(eager, wide, noisy):
                return None
            values.append(Value(target, tuple(eager.shape), eager.dtype, exact, steady))
        return values

    def _differing(self, line: Line, target: str) -> torch.Tensor:
        """The places where integers that a line makes differ between runs, or with what is quantized moved a little."""
        eager, *others = (space[target] for space in self._spaces)
        for nudge in NUDGES:
            moved = self._wide | functions(True, nudge)
            run_lines([line], moved, wide=True)
            others.append(moved[target])
        return torch.stack([other != eager for other in others]).any(0)

    def _is_exact(self, eager: torch.Tensor, wide: torch.Tensor, kind: str, operands: list[Value]) -> bool:
        if kind in (SMOOTH, REDUCTION):
            return False
        if kind == SUM:
            magnitudes = [self._wide[o.name].abs().sum() for o in operands if o.dtype.is_floating_point]
            if any(float(m) > 4 * LARGEST_EXACT for m in magnitudes):
                return False
        return on_grid(wide) and bool(torch.equal(eager.double(), wide))

    def _is_bounded(self, eager: torch.Tensor, wide: torch.Tensor, noisy: torch.Tensor) -> bool:
        if not eager.numel():
            return True
        largest = float(wide.abs().max())
        if not (eager.isfinite().all() and noisy.isfinite().all()) or not largest <= LARGEST:
            return False
        allowed = MAX_NOISE[eager.dtype] * max(largest, 1e-3)
        return max(float((eager - wide).abs().max()), float((noisy - wide).abs().max())) <= allowed

    def program(self, outputs: Sequence[str]) -> Program:
        """All lines so far, returning `outputs`."""
        # In-place lines can change inputs: the caller compares those as well.
        names = [item.name for item in self.inputs]
        tolerances = {
            name: self._tolerance(name) for name in (*outputs, *names) if self._eager[name].dtype.is_floating_point
        }
        return Program(tuple(self.inputs), tuple(self.lines), tuple(outputs), tolerances)

    def _tolerance(self, name: str) -> float:
        eager, wide, noisy = (space[name] for space in self._spaces)
        if not eager.numel():
            return 0.0
        spread = float((noisy - wide).abs().max()) + float((eager - wide).abs().max())
        return (
            1e-12
            + 10 * spread
            + (0.0 if self._values[name].exact else 16 * torch.finfo(eager.dtype).eps * float(wide.abs().max()))
        )
