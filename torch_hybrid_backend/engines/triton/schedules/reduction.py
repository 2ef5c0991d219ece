"""Rows: reductions over the same axes of one domain, with what is computed before, between and behind them.

A program has a tile of rows by elements of a row. A row that fits is held in registers (persistent): memory is read once. A longer one is read
in chunks, once for each reduction that needs the result of another; what is only mapped is computed again where it is needed.

Source: the persistent and looped reductions of TorchInductor (Ansel et al., "PyTorch 2", ASPLOS 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.schedules.tiles import (
    axis,
    block_for,
    blocks,
    flattened,
    power_of_2,
    program_start,
)
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Buffer, buffers_of_expr
from torch_hybrid_backend.loops.kernels import RowKernel, Stage
from torch_hybrid_backend.loops.ops import INTEGER_BITS, is_float
from torch_hybrid_backend.sizes.size import product, size_hint

_MAX_PERSISTENT = 8192  # elements of a row that are held in registers
_CHUNK = 2048
_INTERPRETED = 1 << 20  # the same for the interpreter, where registers cost nothing
_ELEMENTS_PER_WARP = 256
_NOWHERE = (1 << 31) - 1


def launch(kernel: RowKernel, target: Target) -> Launch:
    rows = product([v.extent for d, v in enumerate(kernel.domain) if d not in kernel.axes])
    elements = product([kernel.domain[d].extent for d in kernel.axes])
    most = _INTERPRETED if target.has_large_tiles else _MAX_PERSISTENT
    width = power_of_2(max(1, elements)) if isinstance(elements, int) and elements <= most else min(most, _CHUNK)
    height = block_for(rows, min(target.elements // width, -(-size_hint(rows) // target.programs)))
    warps = min(16, power_of_2(-(-height * width // _ELEMENTS_PER_WARP)))
    return Launch((blocks(rows, height), 1, 1), {"ROWS": height, "COLUMNS": width}, warps)


def emit(kernel: RowKernel, printer: Printer, target: Target, launch: Launch) -> None:
    rows, row_env = flattened([v for d, v in enumerate(kernel.domain) if d not in kernel.axes], "i")
    elements, element_env = flattened([kernel.domain[d] for d in kernel.axes], "j")
    height, width = launch.constants["ROWS"], launch.constants["COLUMNS"]
    tile = Tile(("ROWS", "COLUMNS"))
    with axis(printer, tile, 0, rows, f"{program_start(printer)} * ROWS", height) as row_bounds:
        emitter = _Emitter(kernel, printer, tile, {**row_env, **element_env}, elements, row_bounds)
        if isinstance(elements.extent, int) and elements.extent <= width:
            emitter.persistent(width)
        else:
            emitter.looped(width)


class _Emitter:
    """Writes one kernel's stages. `bounds`: which rows exist."""

    def __init__(
        self,
        kernel: RowKernel,
        printer: Printer,
        tile: Tile,
        env: Mapping[LoopVar, Index],
        elements: LoopVar,
        bounds: Mapping[int, Value],
    ) -> None:
        self._stages = kernel.stages
        self._printer = printer
        self._tile = tile
        self._env = env
        self._elements = elements
        self._bounds = bounds

    def persistent(self, width: int) -> None:
        """All stages in their order, on whole rows."""
        printer = self._printer
        with (
            axis(printer, self._tile, 1, self._elements, "0", width) as columns,
            printer.over(self._tile, self._env, {**self._bounds, **columns}),
        ):
            for stage in self._stages:
                if stage.kind == "reduce":
                    reduction = _Reduction(stage, printer, self._elements.name)
                    self._keep(stage, reduction.of(printer.full(printer.expr(stage.value)), columns.get(1)))
                else:
                    self._run(stage)

    def looped(self, width: int) -> None:
        """Passes over the rows: each has the stages that need the reductions of those before it."""
        printer = self._printer
        passes = _passes(self._stages)
        for stage in self._stages:
            if stage.kind == "map":
                assert stage.local is not None
                printer.locals[stage.local] = lambda _, stage=stage: printer.expr(stage.value)  # type: ignore[misc]
        for number in range(max(passes, default=0) + 1):
            own = [stage for stage, its in zip(self._stages, passes, strict=True) if its == number]
            with printer.over(self._tile, self._env, self._bounds):
                for stage in own:
                    if stage.kind in ("scalar", "store_scalar"):
                        self._run(stage)
            reductions = [_Reduction(s, printer, self._elements.name) for s in own if s.kind == "reduce"]
            stores = [stage for stage in own if stage.kind == "store"]
            if not reductions and not stores:
                continue
            for reduction in reductions:
                reduction.begin()
            head = f"for chunk in range(0, {printer.size(self._elements.extent)}, {width}):"
            with (
                printer.lines.block(head),
                axis(printer, self._tile, 1, self._elements, "chunk", width) as columns,
                printer.over(self._tile, self._env, {**self._bounds, **columns}),
            ):
                for reduction in reductions:
                    reduction.add(printer.expr(reduction.stage.value), columns.get(1))
                for stage in stores:
                    self._run(stage)
            for reduction in reductions:
                self._keep(reduction.stage, reduction.end())

    def _run(self, stage: Stage) -> None:
        printer = self._printer
        if stage.store is not None:
            printer.store(stage.store)
        else:
            self._keep(stage, printer.expr(stage.value))

    def _keep(self, stage: Stage, value: Value) -> None:
        assert stage.local is not None
        self._printer.locals[stage.local] = lambda _: value


def _passes(stages: Sequence[Stage]) -> list[int]:
    """In which pass each stage runs: after the reductions that it needs, directly or through what is mapped."""
    ready: dict[Buffer, int] = {}
    passes: list[int] = []
    for stage in stages:
        own = max((ready.get(buffer, 0) for buffer in buffers_of_expr(stage.value)), default=0)
        passes.append(own)
        if stage.local is not None:
            ready[stage.local] = own + 1 if stage.kind == "reduce" else own
    return passes


class _Reduction:
    """Writes one reduction: of a whole block at once (`of`), or chunk by chunk (`begin`, `add`, `end`). `position`: the element's number."""

    def __init__(self, stage: Stage, printer: Printer, position: str) -> None:
        self.stage = stage
        self._printer = printer
        self._position = position
        self._dtype = stage.value.dtype
        self._type = DTYPES[self._dtype][0]
        self._combiner = stage.combiner.removeprefix("arg")
        self._is_position = stage.combiner.startswith("arg")
        self._name = printer.lines.name("acc")

    def of(self, value: Value, inside: Value | None) -> Value:
        if inside is not None:
            masked = f"tl.where({inside.text}, {value.text}, tl.full([], {self._neutral()}, {self._type}))"
            value = self._printer.let(masked, value.dims)
        if not self._is_position:
            return self._combined(value.text)
        at = self._printer.full(Value.along(self._position, 1))
        return self._first(value.text, at.text, inside)

    def begin(self) -> None:
        add, shape = self._printer.lines.add, self._shape()
        add(f"{self._name} = tl.full({shape}, {self._neutral()}, {self._type})")
        if self._is_position:
            add(f"{self._name}_at = tl.full({shape}, {_NOWHERE}, tl.int32)")

    def add(self, value: Value, inside: Value | None) -> None:
        add, name, new, taken = self._printer.lines.add, self._name, value.text, inside
        if self._is_position:
            better = f"({name}_at == {_NOWHERE}) | {self._is_better(new, name)}"
            taken = self._printer.let(better if inside is None else f"({better}) & {inside.text}")
            add(f"{name}_at = tl.where({taken.text}, {self._position}, {name}_at)")
        else:
            new = self._pairwise(name, new)
        add(f"{name} = {new}" if taken is None else f"{name} = tl.where({taken.text}, {new}, {name})")

    def end(self) -> Value:
        if self._is_position:
            return self._first(self._name, f"{self._name}_at", None)
        return self._combined(self._name)

    def _shape(self) -> str:
        return "[ROWS, COLUMNS]"

    def _neutral(self) -> str:
        return neutral(self._combiner, self._dtype)

    def _pairwise(self, a: str, b: str) -> str:
        match self._combiner:
            case "sum":
                return f"{a} + {b}"
            case "prod":
                return f"{a} * {b}"
            case "any":
                return f"{a} | {b}"
            case "all":
                return f"{a} & {b}"
        if is_float(self._dtype):
            return f"{self._function()}({a}, {b})"
        return f"tl.{self._combiner}imum({a}, {b})"

    def _function(self) -> str:
        """The function that combines two floats."""
        name = {"prod": "multiply", "max": "larger", "min": "smaller"}[self._combiner]
        self._printer.functions.add(name)
        return name

    def _combined(self, block: str) -> Value:
        """The elements of each row of a block combined."""
        match self._combiner:
            case "sum":
                text = f"tl.sum({block}, 1, keep_dims=True).to({self._type})"
            case "any" | "all":
                extreme = "max" if self._combiner == "any" else "min"
                text = f"tl.{extreme}({block}.to(tl.int32), 1, keep_dims=True) != 0"
            case "max" | "min" if not is_float(self._dtype):
                text = f"tl.{self._combiner}({block}.to({self._widest()}), 1, keep_dims=True).to({self._type})"
            case _:
                text = f"tl.reduce({block}, 1, {self._function()}, keep_dims=True)"
        return self._printer.let(text, frozenset((0,)))

    def _widest(self) -> str:
        return "tl.int32" if self._dtype in ("bool", "int8", "uint8", "int16") else self._type

    def _is_better(self, new: str, old: str) -> str:
        """Whether an element takes the place of the most extreme one so far; a NaN is more extreme than all."""
        sign = ">" if self._combiner == "max" else "<"
        if not is_float(self._dtype):
            return f"({new} {sign} {old})"
        return f"({new} {sign} {old}) | (({new} != {new}) & ({old} == {old}))"

    def _first(self, values: str, positions: str, inside: Value | None) -> Value:
        """The least of the positions at which a row has its most extreme value."""
        printer, everything = self._printer, frozenset((0, 1))
        top = self._combined(values).text
        hit = f"({values} == {top})"
        if is_float(self._dtype):
            hit = f"({hit} | (({values} != {values}) & ({top} != {top})))"
        if inside is not None:
            hit = f"{hit} & {inside.text}"
        hits = printer.let(hit, everything)
        at = f"tl.where({hits.text}, {positions}, {_NOWHERE})"
        return printer.let(f"tl.min({at}, 1, keep_dims=True).to(tl.int64)", frozenset((0,)))


def neutral(combiner: str, dtype: str) -> str:
    """What changes nothing that it is combined with."""
    match combiner:
        case "sum" | "any":
            return literal(0, dtype)
        case "prod" | "all":
            return literal(1, dtype)
    lowest = combiner == "max"
    if is_float(dtype):
        return "float('-inf')" if lowest else "float('inf')"
    if dtype == "bool":
        return str(not lowest)
    if dtype == "uint8":
        return "0" if lowest else "255"
    bits = INTEGER_BITS[dtype]
    return str(-(1 << (bits - 1)) if lowest else (1 << (bits - 1)) - 1)
