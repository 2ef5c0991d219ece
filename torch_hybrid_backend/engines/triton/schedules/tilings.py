"""Tilings of matrix products and convolutions for a GPU, and their expected cost.

The model counts clocks of one multiprocessor: what tensor cores take for its tiles, what the second-level cache takes to bring their operands,
a start for each program that no other one hides, and at least what memory takes for the whole. It ranks; which tiling wins is measured.
It has not been held against a GPU yet: its rates are those of NVIDIA's data sheets, and of the sources named below.

Source of the form: Williams et al., "Roofline", CACM 2009; of splitting k: "split-K" in NVIDIA's CUTLASS documentation, "Efficient GEMM";
of sharing the last round of tiles: Osama et al., "Stream-K", PPoPP 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch_hybrid_backend.engines.triton.schedules.tiles import block_for, power_of_2
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import ConvKernel, Kernel, MatMulKernel, Store

HALVES = ("float16", "bfloat16")
MIN_TILE = 16  # of `tl.dot`
MOST_THIN = 8  # rows, or columns, of a product that is thin


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program computes `rows` by `columns` of a product, along k in steps of `depth`; `splits` programs share one such tile, each with a part
    of k. `warps` of 32 threads run it, and load `stages` steps ahead. `is_thin`: by sums of products, without tensor cores.

    `sharers`: so many more programs share the steps along k of the last `shared` tiles evenly (stream-K); each of the others has a tile.
    `persistent`: there are only so many programs, which take one tile after the other and have the tensor memory accelerator (TMA) copy
    operands.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    splits: int = 1
    is_thin: bool = False
    shared: int = 0
    sharers: int = 0
    persistent: int = 0

    @property
    def name(self) -> str:
        how = f" {self.splits} parts" if self.splits > 1 else ""
        how += f" last {self.shared} by {self.sharers}" if self.sharers else ""
        how += f" TMA {self.persistent} programs" if self.persistent else ""
        kind = "thin" if self.is_thin else "tiles"
        return f"{kind} {self.rows}x{self.columns}x{self.depth} {self.warps} warps {self.stages} stages{how}"

    @property
    def kind(self) -> tuple[int | bool, ...]:
        """The property in which tilings that are worth timing beside each other differ: the shape of plain ones, or how they share the work."""
        if self.sharers or self.persistent:
            return self.sharers > 0, self.persistent > 0
        return self.rows, self.columns, self.splits > 1

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares that programs have of the last of `tiles` tiles: the steps along k of all `shared` ones, `steps` each, one behind the other,
    are cut into parts of `each` steps, one for a program. A program whose part ends within a tile, and the one that goes on there, have a sum
    each."""

    tiles: int
    shared: int
    steps: int
    each: int

    @property
    def whole(self) -> int:
        """The tiles before them, each of which one program computes."""
        return self.tiles - self.shared

    @property
    def programs(self) -> int:
        return -(-self.shared * self.steps // self.each)

    @property
    def sums(self) -> int:
        """Places for sums. That of program p for shared tile t is p + t: from one sum to the next either one grows, or both."""
        return self.programs + self.shared - 1


def shares_of(tiling: Tiling, tiles: int, steps: int) -> Shares:
    """The shares of a tiling with `sharers`."""
    assert 0 < tiling.shared <= tiles, "a tiling is of the product that it was made for"
    return Shares(tiles, tiling.shared, steps, -(-tiling.shared * steps // tiling.sharers))


# Bytes of an element; 1 of what is not here.
_WIDTHS = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
}
WHOLE = LoopVar("part", 1)


@dataclass(frozen=True, slots=True, eq=False)
class TiledMatMulKernel(MatMulKernel):
    """A matrix product cut up as `tiling` says. `part`: which of its parts along k a program computes; stores may use it."""

    tiling: Tiling = field(kw_only=True)
    part: LoopVar = field(default=WHOLE, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class StreamMatMulKernel(TiledMatMulKernel):
    """A product whose tiling has sharers: whole tiles are stored as `stores` say; each sum of a shared one is added up by a `FixUpKernel`, from
    `partial` (sums, rows, columns)."""

    partial: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class FixUpKernel(Kernel):
    """Domain (b, m, n), as of the matrix product that wrote `partial`: accumulator[b, m, n] = its sums, added in the order of k, then the
    stores read `accumulator`; in the shared tiles only. `k`: what the product is summed over."""

    tiling: Tiling
    k: LoopVar
    partial: Buffer
    accumulator: Buffer
    stores: tuple[Store, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TiledConvKernel(ConvKernel):
    """The same for a convolution, whose k is the channels of a group by the taps of its window."""

    tiling: Tiling = field(kw_only=True)
    part: LoopVar = field(default=WHOLE, kw_only=True)


def part_of(kernel: Kernel) -> LoopVar:
    """The parts along k of a kernel; one of a kernel that is not split."""
    return kernel.part if isinstance(kernel, TiledMatMulKernel | TiledConvKernel) else WHOLE


@dataclass(frozen=True, slots=True)
class Work:
    """Work to be tiled: `batch` products of m by k and k by n, at typical sizes.

    `dtype`: what both operands are held in; `tf32`: float32 may be rounded to TF32. `bytes`: read and written at least. `run`: elements along k
    that a step stays within (those of one tap of a window); `deepest`: most of them that a step is to have. `is_left_along_k`,
    `is_right_along_k`: whether neighbours along k are neighbours in memory. `can_split`: the size of the result is known when it is
    compiled, and with that what the parts along k take. `can_be_thin`: it is a matrix product of known size. `can_share`: so is k, and programs
    may share tiles. `can_copy`: TMA can copy both operands. `stored`: bytes of an element of the widest result. `has_long_epilogue`: what is
    fused behind it wants registers of its own.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    bytes: int
    run: int
    tf32: bool = False
    is_left_along_k: bool = True
    is_right_along_k: bool = True
    deepest: int = 1 << 16
    can_split: bool = True
    can_be_thin: bool = True
    can_share: bool = False
    can_copy: bool = False
    stored: int = 4
    has_long_epilogue: bool = False

    @property
    def is_for_tensor_cores(self) -> bool:
        """Halves, and float32 where it may be rounded."""
        return self.dtype in HALVES or (self.dtype == "float32" and self.tf32)

    @property
    def element(self) -> int:
        """Bytes."""
        return width_of(self.dtype)


@dataclass(frozen=True, slots=True)
class _Chip:
    """Facts about one multiprocessor. `shared`: bytes of shared memory that a program may have. By clock: multiply-adds of float16 (with sums
    in float32), float32 and float64; bytes of memory."""

    shared: int
    half: int
    single: int
    double: int
    memory: float


# By compute capability. Source: NVIDIA's whitepapers of GA100, GA102, AD102, GH100, GB202, and the CUDA C++ Programming Guide, "Compute
# Capabilities" (shared memory).
_CHIPS = {
    80: _Chip(163 << 10, 1024, 64, 64, 13),
    86: _Chip(99 << 10, 256, 128, 1, 6.7),
    87: _Chip(163 << 10, 256, 128, 1, 6.7),
    89: _Chip(99 << 10, 256, 128, 1, 3.1),
    90: _Chip(227 << 10, 2048, 128, 128, 16),
    100: _Chip(227 << 10, 4096, 128, 64, 28),
    120: _Chip(99 << 10, 256, 128, 1, 4.4),
}
_L2 = 40.0  # bytes by clock that the second-level cache gives one multiprocessor: what matmuls near the peak of an H100 get by with
_SHARED = 128.0  # bytes by clock that shared memory gives
_SPILLED = 4000.0  # clocks of a program whose sums leave its epilogue no registers: they go to memory and come back
_MOST_SUMS = 64  # that each thread holds, with a long epilogue
_SERIAL = 0.2  # of the shorter of computing and reading, which does not overlap with the longer
_START = 1500.0  # clocks from a program's start to its first product, and from its last to its end
_LAUNCH = 3000.0  # clocks of one more kernel
_EFFICIENCY = 0.8  # of tensor cores, in loops that do nothing else
_SMALL_EFFICIENCY = 0.6  # of Hopper's, where a tile has too few rows for `wgmma`
_MOST_PARTIAL = 32 << 20  # bytes of sums of parts
_MIN_STEPS = 4  # of a part along k
_MOST_SHARING = 8  # programs of one tile: the sums of a tile are read one after the other
_SPLITS = (1, 2, 4, 8, 16, 32)

# rows, columns, bytes along k, warps, stages. With a short epilogue none of them spills on sm_80 or sm_90
# (tests/engines/triton/schedules/test_machine_code.py); what models' kernels spill is in tests/golden/engines/triton/test_golden_kernels.
_TENSOR_TILES = (
    (128, 128, 128, 8, 3),
    (64, 128, 128, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (64, 32, 128, 4, 4),
    (32, 32, 256, 4, 3),
    (16, 64, 256, 4, 4),
    (64, 16, 256, 4, 4),
    (16, 128, 128, 4, 4),
    (128, 16, 128, 4, 4),
)
_LARGE_TILES = ((128, 256, 128, 8, 3), (256, 128, 128, 8, 3))  # only `wgmma` has registers for these
# Of persistent programs.
_COPIED_TILES = (
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (64, 128, 128, 4, 4),
    (128, 64, 128, 4, 4),
)
_SINGLE_TILES = ((128, 64, 64, 8, 3), (64, 64, 64, 4, 3), (32, 64, 64, 4, 3), (32, 32, 128, 4, 3), (16, 64, 128, 4, 3))
_DOUBLE_TILES = ((64, 64, 128, 4, 3), (32, 32, 128, 4, 3), (16, 32, 128, 4, 3), (32, 16, 128, 4, 3))
_INTEGER_TILES = ((32, 32, 32, 4, 1), (16, 16, 64, 4, 1))
_WARPS, _DOT_WARPS = 64, 16  # that a multiprocessor has at once: with few registers, and with 128 a thread
_THREADS = 128  # of a program of a thin product
_LINE = 128  # bytes: of memory that is read at once
_VECTOR = 16  # bytes that a thread loads at once


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return _WIDTHS.get(dtype, 1)


def best(work: Work, target: Target) -> Tiling:
    """The tiling of least cost that has a program for each tile."""
    return ranked(replace(work, can_split=False, can_share=False, can_copy=False), target)[0][0]


def ranked(work: Work, target: Target) -> list[tuple[Tiling, float]]:
    """The tilings and their costs in clocks, best first; never empty."""
    if target.has_large_tiles:
        return [(_interpreted(work), 0.0)]
    chip = _chip(target)
    whole = [tiling for tiling in _tilings(work, target) if _shared_bytes(tiling, work) <= chip.shared]
    found = [replace(tiling, splits=splits) for tiling in whole for splits in _splits(tiling, work)]
    costs = {tiling: _cost(tiling, work, target) for tiling in found}
    least = min(costs.values())
    for tiling in (*(way for each in whole for way in _with_sharers(each, work, target)), *persistent(work, target)):
        if (cost := _cost(tiling, work, target)) < least:  # what a plain tiling does as well is not worth trying
            costs[tiling] = cost
    return sorted(costs.items(), key=lambda item: item[1])


def _tilings(work: Work, target: Target) -> list[Tiling]:
    shapes: tuple[tuple[int, ...], ...]
    least = MIN_TILE
    if work.dtype == "float64":
        shapes = _DOUBLE_TILES
    elif work.dtype == "float32" and not work.tf32:
        shapes = _SINGLE_TILES
    elif work.dtype in (*HALVES, "float32"):
        shapes = (*_LARGE_TILES, *_TENSOR_TILES) if target.capability == 90 else _TENSOR_TILES
    else:
        shapes, least = _INTEGER_TILES, 1
    found = [_thin(work)] if work.can_be_thin and min(work.m, work.n) <= MOST_THIN else []
    for rows, columns, deep, warps, stages in shapes:
        # One with more rows or columns than there are, rounded up, is another one of these but narrower; the last one serves all.
        fits = rows <= max(MIN_TILE, power_of_2(work.m)) and columns <= max(MIN_TILE, power_of_2(work.n))
        if fits or (not found and shapes[-1] == (rows, columns, deep, warps, stages)):
            edges = block_for(work.m, rows, MIN_TILE), block_for(work.n, columns, MIN_TILE)
            found.append(
                Tiling(*edges, block_for(work.run, min(deep // work.element, work.deepest), least), warps, stages)
            )
    return found


def _thin(work: Work) -> Tiling:
    """Programs with some rows of the larger operand, read 16 bytes a thread along whichever axis is contiguous."""
    is_left = work.m > work.n  # the larger one
    few = power_of_2(min(work.m, work.n))
    elements = _THREADS * _VECTOR // work.element * (2 if few <= 2 else 1)
    line = _LINE // work.element
    if _is_along_k(work):
        depth = block_for(work.k, 4 * line, min(line, power_of_2(work.k)))
        many = block_for(work.m if is_left else work.n, elements // depth)
    else:
        many = block_for(work.m if is_left else work.n, line)
        depth = block_for(work.k, elements // many)
    rows, columns = (many, few) if is_left else (few, many)
    return Tiling(rows, columns, depth, _THREADS // 32, 3, is_thin=True)


def _is_along_k(work: Work) -> bool:
    """True if the larger operand's neighbours along k are neighbours in memory."""
    return work.is_left_along_k if work.m > work.n else work.is_right_along_k


def _splits(tiling: Tiling, work: Work) -> list[int]:
    steps = _steps(tiling, work)
    return [
        splits
        for splits in _SPLITS
        if splits == 1
        or (
            work.can_split
            and steps >= _MIN_STEPS * splits
            and 4 * splits * work.batch * work.m * work.n <= _MOST_PARTIAL
        )
    ]


def _with_sharers(tiling: Tiling, work: Work, target: Target) -> list[Tiling]:
    """The tiling with the tiles of the last round shared, where there are such."""
    tiles, steps = tiles_of(tiling, work.batch, work.m, work.n), _steps(tiling, work)
    shared = tiles % target.multiprocessors
    sharers = min(target.multiprocessors, shared * steps // _MIN_STEPS, _MOST_SHARING * shared)
    if not work.can_share or tiling.is_thin or sharers <= shared:
        return []
    made = replace(tiling, shared=shared, sharers=sharers)
    partial = 4 * shares_of(made, tiles, steps).sums * tiling.rows * tiling.columns
    return [made] if partial <= _MOST_PARTIAL else []


def persistent(work: Work, target: Target) -> list[Tiling]:
    """Tilings whose operands TMA copies, of more tiles than there are multiprocessors: the first loads of a tile then run beside the end of the
    tile before it, which is what persistent programs are for."""
    if not work.can_copy or target.capability != 90 or not work.is_for_tensor_cores:
        return []
    found = []
    for rows, columns, deep, warps, stages in _COPIED_TILES:
        tiling = Tiling(rows, columns, deep // work.element, warps, stages, persistent=target.multiprocessors)
        has_turns = tiles_of(tiling, work.batch, work.m, work.n) > target.multiprocessors
        if has_turns and work.k >= tiling.depth and _shared_bytes(tiling, work) <= most_shared_bytes(target):
            found.append(tiling)
    return found


def tiles_of(tiling: Tiling, batch: int, m: int, n: int) -> int:
    """The number of tiles that cover `batch` results of m by n."""
    return batch * -(-m // tiling.rows) * -(-n // tiling.columns)


def _steps(tiling: Tiling, work: Work) -> int:
    return max(1, work.k // max(1, work.run)) * -(-work.run // tiling.depth)


def _shared_bytes(tiling: Tiling, work: Work) -> int:
    if tiling.is_thin:
        return 0
    # What is loaded ahead of a persistent program's next tile lies beside the results that pass through shared memory, at most all of them.
    results = tiling.rows * tiling.columns * work.stored if tiling.persistent else 0
    return tiling.stages * (tiling.rows + tiling.columns) * tiling.depth * work.element + results


def _cost(tiling: Tiling, work: Work, target: Target) -> float:
    """Clocks."""
    chip = _chip(target)
    rows, columns, depth = tiling.rows, tiling.columns, tiling.depth
    tiles, steps = tiles_of(tiling, work.batch, work.m, work.n), _steps(tiling, work)
    turns = -(-tiles * tiling.splits // target.multiprocessors)
    own = turns * -(-steps // tiling.splits)  # steps of a multiprocessor
    partial = 4 * tiling.splits * work.batch * work.m * work.n if tiling.splits > 1 else 0  # bytes of sums
    if tiling.sharers:
        shares = shares_of(tiling, tiles, steps)
        own = shares.whole // target.multiprocessors * steps + shares.each
        partial = 4 * shares.sums * rows * columns
    multiply_adds = rows * columns * depth
    if tiling.is_thin:
        few, many = sorted((rows, columns))
        # Of the few rows, for each vector of the larger operand: a vector, or element by element where k does not run along it.
        each = _SHARED if _is_along_k(work) else _SHARED / 4
        loads = few * many * depth * work.element / each
        step = max(multiply_adds / (chip.single / 2), many * depth * work.element / _L2, loads)
    else:
        step = max(multiply_adds / _rate(tiling, work, target), (rows + columns) * depth * work.element / _L2)
    # Those that a multiprocessor has at once, as far as shared memory and registers go.
    warps = _WARPS if tiling.is_thin else _DOT_WARPS
    resident = max(1, min(chip.shared // max(1, _shared_bytes(tiling, work)), warps // tiling.warps))
    busy = own * step
    moved = work.bytes / (chip.memory * target.multiprocessors)
    cost = max(busy, moved) + _SERIAL * min(busy, moved)
    # A persistent program's next tile begins while the last one ends: half of what lies between two of them is hidden.
    cost += (turns + 1) / 2 * _START if tiling.persistent else -(-turns // resident) * _START
    if work.has_long_epilogue and tiling.splits == 1 and rows * columns > _MOST_SUMS * 32 * tiling.warps:
        cost += turns * _SPILLED
    if partial:
        cost += _LAUNCH + 2 * partial / (chip.memory * target.multiprocessors)
    return cost


def _rate(tiling: Tiling, work: Work, target: Target) -> float:
    """Multiply-adds by clock."""
    chip = _chip(target)
    if work.is_for_tensor_cores:
        full = chip.half if work.dtype in HALVES else chip.half / 2
        is_small = target.capability >= 90 and tiling.rows < 64
        return full * (_SMALL_EFFICIENCY if is_small else _EFFICIENCY)
    if work.dtype == "float32":
        # Of its edge by edge elements a thread reads 2 edges from shared memory for each of k.
        edge = math.sqrt(tiling.rows * tiling.columns / (32 * tiling.warps))
        return chip.single * edge / (edge + 4)
    return chip.double if work.dtype == "float64" else chip.single / 4


def most_shared_bytes(target: Target) -> int:
    """The most shared memory, in bytes, that a program may have."""
    return _chip(target).shared


def _chip(target: Target) -> _Chip:
    """The chip, or the latest one before it that is known."""
    return _CHIPS[max(known for known in _CHIPS if known <= max(target.capability, min(_CHIPS)))]


def _interpreted(work: Work) -> Tiling:
    """The tiling of the interpreter: as large as may be."""
    most, depth = (1024, 4096) if work.dtype in (*HALVES, "float32") else (64, 64)
    return Tiling(
        block_for(work.m, most, MIN_TILE), block_for(work.n, most, MIN_TILE), block_for(work.run, depth, MIN_TILE)
    )
