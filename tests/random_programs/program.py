"""A random program as data: inputs, and one line of Python for each step. It prints as the function it is.

Programs run in three ways from the same text: as written; in float64 (`wide`), where every floating-point dtype means float64; and compiled.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tests.random_programs import quantized
from tests.random_programs.noise import REDUCTION

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LAYOUTS = (
    "contiguous",
    "transposed",
    "strided",
    "offset",
    "expanded",
    "reversed",
    "channels_last",
    "sliced",
    "sliced_last",
)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Input:
    """A tensor that the program is given. Its values follow from the seed: multiples of 1/8 up to 2 in magnitude, small integers, or bits.

    `weight`: handed over as a parameter of a module, which the program does not write to. `scale` multiplies the values of floats.
    `values` overrule seed and scale (`minimise`). `full`: integers of 8 bits over all of their range, half of them
    at its ends.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    seed: int = 0
    weight: bool = False
    scale: float = 1.0
    values: torch.Tensor | None = field(default=None, compare=False)
    full: bool = False

    def tensor(self, wide: bool = False) -> torch.Tensor:
        """The input, new on every call; in float64 where `wide` and it is of floating point."""
        dtype = torch.float64 if wide and self.dtype.is_floating_point else self.dtype
        if self.values is not None:
            return arranged(self.values.to(dtype), self.layout)
        generator = torch.Generator().manual_seed(self.seed)
        if self.dtype is torch.bool:
            values = torch.randint(0, 2, self.shape, generator=generator).bool()
        elif self.dtype.is_floating_point:
            values = torch.randint(-16, 17, self.shape, generator=generator) / 8 * self.scale
        elif self.full:
            low, end = (0, 256) if self.dtype is torch.uint8 else (-127, 128)
            values = torch.randint(2 * low - end, 2 * end - low, self.shape, generator=generator).clamp(low, end - 1)
        else:
            values = torch.randint(0 if self.dtype is torch.uint8 else -8, 9, self.shape, generator=generator)
        return arranged(values.to(dtype), self.layout)

    def __str__(self) -> str:
        kind = "weight" if self.weight else self.layout
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)} {kind}"


def arranged(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The values in memory of their own, laid out as told where the shape allows it."""
    rank = values.ndim
    if layout == "transposed" and rank >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "reversed" and rank >= 2:
        order = tuple(reversed(range(rank)))
        return values.permute(order).contiguous().permute(order)
    if layout == "strided" and rank >= 1:
        room = torch.zeros((*values.shape[:-1], values.shape[-1] * 2 + 1), dtype=values.dtype)
        view = room[..., 1::2]
        return view.copy_(values)
    if layout == "offset":
        room = torch.zeros(values.numel() + 3, dtype=values.dtype)
        return room[3:].view(values.shape).copy_(values)
    if layout == "expanded" and rank >= 1 and values.shape[0] > 1:
        return values[:1].clone().expand(values.shape)
    if layout == "channels_last" and rank in _CHANNELS_LAST:
        return values.clone(memory_format=_CHANNELS_LAST[rank])
    if (
        layout in ("sliced", "sliced_last") and rank >= 1
    ):  # no stride is what the sizes suggest, nor are those of dimensions of size 1
        room = torch.zeros([size + 2 for size in values.shape], dtype=values.dtype)
        if layout == "sliced_last" and rank in _CHANNELS_LAST:
            room = room.contiguous(memory_format=_CHANNELS_LAST[rank])
        return room[tuple(slice(1, 1 + size) for size in values.shape)].copy_(values)
    return values.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Line:
    """`targets = expression`; without targets a statement, which writes in place. `reads` are the names it mentions, `kind` one of `noise`."""

    targets: tuple[str, ...]
    expression: str
    reads: tuple[str, ...]
    kind: str = REDUCTION

    def __str__(self) -> str:
        return f"{', '.join(self.targets)} = {self.expression}" if self.targets else self.expression


@dataclass(frozen=True)
class Program:
    """Its outputs are names. `tolerances` of the outputs: how far an answer as careful as eager's may lie from float64's (see `scope`)."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    tolerances: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        heads = "\n".join(f"# {item}" for item in self.inputs)
        return f"{heads}\n{self.source()}"

    def source(self) -> str:
        body = [*map(str, self.lines), f"return ({', '.join(self.outputs)},)"]
        names = ", ".join(item.name for item in self.inputs)
        return f"def program({names}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self, wide: bool = False, nudge: float = 0.0) -> Callable[..., tuple[torch.Tensor, ...]]:
        scope = namespace(wide, nudge)
        exec(compile(self.source(), "<random program>", "exec"), scope)
        function: Callable[..., tuple[torch.Tensor, ...]] = scope["program"]
        return function

    def tensors(self, wide: bool = False) -> list[torch.Tensor]:
        return [item.tensor(wide) for item in self.inputs]

    def with_live_inputs(self) -> Program:
        """Without the inputs that nothing reads."""
        read = {name for line in self.lines for name in line.reads} | set(self.outputs)
        return replace(self, inputs=tuple(item for item in self.inputs if item.name in read))


class Module(nn.Module):
    """A program whose weights are parameters, which are trained or not."""

    def __init__(self, program: Program, trained: bool = False) -> None:
        super().__init__()
        self._function = program.function()
        self._order = [(item.name, item.weight) for item in program.inputs]
        for item in program.inputs:
            if item.weight:
                needs_gradient = trained and item.dtype.is_floating_point
                self.register_parameter(item.name, nn.Parameter(item.tensor(), requires_grad=needs_gradient))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = iter(given)
        return self._function(*(getattr(self, name) if weight else next(arguments) for name, weight in self._order))


def namespace(wide: bool, nudge: float = 0.0) -> dict[str, Any]:
    """The names that a program's text may mention. Nudge: what is quantized is moved by this share of its largest value
    (`quantized.functions`)."""
    names: dict[str, Any] = {"torch": torch, "F": nn.functional, "math": math, **quantized.functions(wide, nudge)}
    for dtype in FLOATS:
        names[str(dtype).removeprefix("torch.")] = torch.float64 if wide else dtype
    return names


def dtype_text(dtype: torch.dtype) -> str:
    """The dtype as a program's text names it."""
    return str(dtype).removeprefix("torch.") if dtype.is_floating_point else str(dtype)


@contextlib.contextmanager
def widths(wide: bool) -> Iterator[None]:
    """The default dtype of floats that integers become is float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_lines(lines: Sequence[Line], scope: dict[str, Any], wide: bool, trained: bool = False) -> None:
    """Execute the lines in a namespace that holds what they read; `trained`: such that gradients can be taken."""
    with widths(wide), torch.set_grad_enabled(trained), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in lines:
            exec(compile(str(line), "<line>", "exec"), scope)
