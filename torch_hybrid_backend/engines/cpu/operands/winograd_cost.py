"""The choice of a convolution's algorithm: arithmetic on shapes and the target alone, because the weight is packed for it.

A direct sum does 9 multiplications per output and input channel of a 3x3 kernel; Winograd's F(2x2) does 4, F(4x4) 2.25, and pays with
transforms of input and output, with larger weights to stream, and with tiles that reach beyond the output. All three are counted in cycles.

Nothing here imports TVM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.operands.winograd_transform import POINTS, output_blocks, tile_size
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, function, size_hint

# Of the peak (two multiply-adds of a vector a cycle) what the inner loops reach: measured, 2-core Zen 5.
_DIRECT_SHARE, _WINOGRAD_SHARE = 0.88, 0.80
# Bytes a cycle that one core gets of weights: from memory, and from a cache that others share.
_MEMORY_BYTES, _SHARED_BYTES = 3.0, 10.0
# Of a vector of weights at one position, transformed in each call: 41 to 45 cycles, 2-core Zen 5.
_TRANSFORM_CYCLES = 40


@dataclass(frozen=True, slots=True)
class WinogradTasks:
    """The tasks of a Winograd kernel: `runs` of `tiles` tiles (the last may be shorter), the output channels in `channel_groups`.

    Where the image's size is only known at run time, a run has `per_run` tiles, at most `tiles`; elsewhere `per_run` is `tiles`.
    """

    tiles: int
    runs: Dim
    channel_groups: int
    per_run: Dim


def winograd_tasks(
    images: Dim, outputs: int, inputs: int, size: tuple[Dim, Dim], m: int, target: Target, groups: int = 1
) -> WinogradTasks:
    """The cut of each of `groups` with `size` (rows, columns) of output: see `schedules.winograd`. outputs, inputs: channels of one group."""
    return _tasks(images, outputs, inputs, size, m, target, groups)[1]


def _tasks(
    images: Dim, outputs: int, inputs: int, size: tuple[Dim, Dim], m: int, target: Target, groups: int
) -> tuple[float, WinogradTasks]:
    """(estimated cycles, cut); the cheapest of sharing tiles and of sharing output channels among the cores."""
    total = images * (ceil_div(size[0], m) * ceil_div(size[1], m))
    is_open = any(isinstance(n, Size) for n in size)
    count, positions = max(1, size_hint(total)), tile_size(m) ** 2
    # The transformed input of a task, and beside it the products of one part, in three quarters of the cache.
    most = max(
        4,
        (3 * target.l2_bytes // 4) // (4 * positions * (inputs + output_blocks(outputs, target.lanes) * target.lanes)),
    )
    parts = -(-outputs // (output_blocks(outputs, target.lanes) * target.lanes))
    best: tuple[float, WinogradTasks] | None = None
    for channel_groups in {1, min(target.cores, parts)}:
        even = target.cores // math.gcd(target.cores, groups) if channel_groups == 1 else 1
        runs = -(-count // most)
        runs = min(count, -(-runs // even) * even)
        tiles = -(-count // runs)
        waves = -(-runs * groups * channel_groups // target.cores)
        cycles = waves * _task_cycles(tiles, -(-parts // channel_groups) / parts * outputs, inputs, m, target)
        tasks = WinogradTasks(tiles, ceil_div(total, tiles), channel_groups, tiles)
        if is_open:
            all_runs = ceil_div(ceil_div(total, most), even) * even
            tasks = WinogradTasks(most, all_runs, channel_groups, ceil_div(total, function("max", all_runs, 1)))
        if best is None or cycles < best[0]:
            best = cycles, tasks
    assert best is not None
    weights = 4 * positions * groups * inputs * outputs
    return best[0] + 0.5 * weights / (_MEMORY_BYTES * target.cores), best[1]


def _task_cycles(tiles: int, outputs: float, inputs: int, m: int, target: Target) -> float:
    """Products, transforms and the weights of one task."""
    n, lanes = tile_size(m), target.lanes
    products = tiles * n * n * inputs * outputs / (2 * lanes * _WINOGRAD_SHARE)
    transforms = tiles * (inputs / lanes * 3 * n * n + outputs / lanes * (2 * n * n + 3 * m * m))
    weights = 4 * n * n * inputs * outputs / _SHARED_BYTES
    return max(products, weights) + transforms


def _direct_cycles(images: Dim, outputs: int, inputs: int, size: tuple[Dim, Dim], target: Target, groups: int) -> float:
    multiply_adds = size_hint(images * size[0] * size[1]) * 9 * groups * inputs * outputs
    weights = 4 * 9 * groups * inputs * outputs
    compute = multiply_adds / (2 * target.lanes * _DIRECT_SHARE * target.cores)
    return compute + 0.5 * weights / (_MEMORY_BYTES * target.cores)


def winograd_gains(
    images: Dim,
    outputs: int,
    inputs: int,
    size: tuple[Dim, Dim],
    target: Target,
    groups: int = 1,
    transforms_weight: bool = False,
) -> dict[int, float]:
    """Estimate how many times faster F(m x m) is than a direct sum, by m and best first: for a 3x3 convolution with stride 1 and `size`
    (rows, columns) of output. outputs, inputs: channels of one group. Empty where its schedule does not serve: channels that do not fill
    vectors (those of all groups but one must), nothing to compute. transforms_weight: the weight changes, and is transformed in each call."""
    if inputs % target.lanes or outputs < target.lanes or not size_hint(images) or not all(map(size_hint, size)):
        return {}
    if groups > 1 and outputs % target.lanes:
        return {}
    direct = _direct_cycles(images, outputs, inputs, size, target, groups)
    cycles = {m: _tasks(images, outputs, inputs, size, m, target, groups)[0] for m in POINTS}
    if transforms_weight:
        vectors = groups * inputs * outputs / target.lanes / target.cores
        cycles = {m: known + vectors * tile_size(m) ** 2 * _TRANSFORM_CYCLES for m, known in cycles.items()}
    gains = {m: direct / known for m, known in cycles.items()}
    return dict(sorted(gains.items(), key=lambda item: -item[1]))
