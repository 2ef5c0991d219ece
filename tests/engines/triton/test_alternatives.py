"""The ways of computing a product: all give the same, and the first call may choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.cpu.kernels_for_tests import attention_kernel, row_sum_kernel
from tests.engines.triton.programs_for_tests import run_program
from tests.engines.triton.regions_for_tests import HOPPER, compiled, kernels_of, program_of
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.variants import Variant, variants
from torch_hybrid_backend.core.program import DeviceLaunch, LaunchGraph
from torch_hybrid_backend.engines.triton.alternatives import alternatives, tiled
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    FixUpKernel,
    StreamMatMulKernel,
    TiledMatMulKernel,
    Tiling,
    tiles_of,
)
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.loops.kernels import ConvKernel, MapKernel, MatMulKernel
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytest.importorskip("triton")

Function = Callable[..., torch.Tensor]


def _results(
    folder: Path, function: Function, inputs: tuple[torch.Tensor, ...], tilings: tuple[Tiling, ...] = ()
) -> dict[str, torch.Tensor]:
    """The results of every alternative of the function's one kernel gives, by name, and what it gives with `tilings`."""
    region, taken = compiled(folder, function, *inputs)
    (kernel,) = region.kernels.kernels
    assert isinstance(kernel, MatMulKernel | ConvKernel)
    results = {}
    own = [Variant(tiling.name, tiled(kernel, tiling)) for tiling in tilings]
    for variant in (*variants(kernel, alternatives(kernel, HOPPER)), *own):
        memory = dict(zip(region.kernels.inputs, taken, strict=True))
        for each in variant.kernels:
            memory.update(zip((w.buffer for w in each.writes), run_program(each, memory), strict=True))
        results[variant.name] = memory[region.kernels.outputs[0]]
    return results


def _check(
    folder: Path, function: Function, *inputs: torch.Tensor, tilings: tuple[Tiling, ...] = (), tolerance: float = 2e-5
) -> None:
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    results = _results(folder, function, inputs, tilings)
    for got in results.values():
        torch.testing.assert_close(got.to(exact.dtype), exact, rtol=tolerance, atol=tolerance)


def test_shared_and_persistent_products(tmp_path: Path) -> None:
    """Programs that share the last tiles, all of them too, and that take several; tiles that are copied, with edges, batches and either order
    of memory."""
    linear = torch.nn.functional.linear
    copied = (Tiling(16, 32, 16, persistent=3), Tiling(64, 64, 32, persistent=2))

    def ways(m: int, n: int, batch: int = 1) -> tuple[Tiling, ...]:
        first, small, deep = Tiling(16, 32, 16), Tiling(32, 16, 16), Tiling(16, 16, 64)
        tiles = {tiling: tiles_of(tiling, batch, m, n) for tiling in (first, small, deep)}
        return (
            dataclasses.replace(first, shared=tiles[first] // 2, sharers=tiles[first] // 2 + 3),
            dataclasses.replace(small, shared=tiles[small], sharers=tiles[small] + 1),
            dataclasses.replace(deep, shared=1, sharers=2),
            *copied,
        )

    x, w, bias, other = torch.randn(49, 72), torch.randn(41, 72), torch.randn(41), torch.randn(49, 41)
    function = lambda x, w, b, o: linear(x, w, b).relu() + o  # noqa: E731
    _check(tmp_path, function, x, w, bias, other, tilings=ways(49, 41))
    a, b = torch.randn(40, 72), torch.randn(72, 24)
    _check(tmp_path, lambda a, b: a.t() @ b, a.t().contiguous(), b, tilings=ways(40, 24))
    _check(tmp_path, torch.mm, a.bfloat16(), b.bfloat16(), tilings=ways(40, 24), tolerance=3e-2)
    _check(tmp_path, torch.mm, a.double(), b.double(), tilings=ways(40, 24)[:1])
    _check(tmp_path, torch.mm, *((8 * x).long() for x in (a, b)), tilings=ways(40, 24)[:1])
    c, d = torch.randn(3, 40, 72).half(), torch.randn(3, 72, 24).half()
    _check(tmp_path, lambda c, d: torch.bmm(c, d) * 2, c, d, tilings=ways(40, 24, 3), tolerance=3e-2)
    _check(tmp_path, lambda c, d: c.mT @ d, c.mT.contiguous(), d, tilings=ways(40, 24, 3), tolerance=3e-2)


def test_matrix_products(tmp_path: Path) -> None:
    """Tiles of other shapes, thin ones, parts along k that are even, uneven or empty; operands and epilogues that are computed."""
    linear = torch.nn.functional.linear
    uneven = (Tiling(16, 32, 16, splits=3), Tiling(32, 64, 16, splits=8), Tiling(2, 16, 64, splits=2, is_thin=True))
    x, w, bias = torch.randn(17, 70), torch.randn(40, 70), torch.randn(40)
    _check(tmp_path, lambda x, w, b: linear(x, w, b).relu() * 2, x, w, bias, tilings=uneven)
    a, b = torch.randn(2, 20, 72).half(), torch.randn(2, 72, 33).half()
    _check(tmp_path, torch.bmm, a, b, tilings=uneven[:1], tolerance=3e-2)
    _check(tmp_path, torch.mm, *(torch.randint(-9, 9, shape) for shape in ((20, 40), (40, 17))), tilings=uneven[1:])
    _check(tmp_path, torch.mm, torch.randn(20, 40).double(), torch.randn(40, 17).double(), tilings=uneven[:1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions(memory_format: torch.memory_format, tmp_path: Path) -> None:
    """Parts of k begin in the middle of a window, and of a group's channels; the second kernel has the epilogue."""

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, b, stride=2, padding=1, groups=x.shape[1] // w.shape[1]).relu()

    tilings = (Tiling(16, 32, 16, splits=4), Tiling(16, 16, 32, splits=40))
    for channels, groups in ((40, 2), (6, 1)):  # steps within a tap; steps through the window
        x = torch.randn(1, channels, 7, 5).to(memory_format=memory_format)
        w = torch.randn(20 * groups, channels // groups, 3, 3).to(memory_format=memory_format)
        _check(tmp_path, convolve, x, w, torch.randn(20 * groups), tilings=tilings, tolerance=1e-4)


def test_long_k_is_split_where_nothing_was_timed(tmp_path: Path) -> None:
    """With one tile and k of 70,000: the sums of parts, then a kernel that adds them and has the epilogue."""
    x, w, bias = (torch.randn(16, 70_000) / 100).half(), torch.randn(16, 70_000).half(), torch.randn(16).half()
    region, taken = compiled(tmp_path, lambda x, w, b: torch.nn.functional.linear(x, w, b).relu(), x, w, bias)
    (option,) = region.options
    assert [type(kernel) for kernel in option.chosen.variant.kernels] == [TiledMatMulKernel, MapKernel]
    exact = torch.nn.functional.linear(x.double(), w.double(), bias.double()).relu()
    torch.testing.assert_close(region(taken)[0].double(), exact, rtol=1e-3, atol=1e-3)


def test_what_is_worth_timing_on_a_gpu() -> None:
    """A badly filled last round is shared even where nothing was timed; persistent programs are for the clock alone. One of each is enough."""
    half = torch.float16

    def found(m: int, n: int, k: int) -> list[Variant]:
        inputs = torch.empty(m, k, dtype=half), torch.empty(n, k, dtype=half)
        (kernel,) = kernels_of(torch.nn.functional.linear, *inputs, target=Target(90, 132))
        return alternatives(kernel, Target(90, 132))

    first, *others = found(1536, 1536, 8192)
    assert [type(kernel) for kernel in first.kernels] == [StreamMatMulKernel, FixUpKernel]
    assert first.is_preferred
    assert not any(isinstance(variant.kernels[0], StreamMatMulKernel) for variant in others)
    tilings = [v.kernels[0].tiling for v in found(4096, 4096, 4096) if isinstance(v.kernels[0], TiledMatMulKernel)]
    assert [bool(tiling.persistent) for tiling in tilings] == [True, False, False]
    assert not any(variant.is_preferred for variant in found(4096, 4096, 4096))


def test_kernels_of_shares_in_a_plan(tmp_path: Path) -> None:
    """Both write one result, between other kernels: the second one after the first, in a CUDA graph too, whose driver here runs whatever may
    run in any order. Every call gives equal bits."""
    inputs = torch.randn(40, 72), torch.randn(41, 72), torch.randn(40, 41)
    function = lambda x, w, o: torch.softmax(torch.nn.functional.linear(x.exp(), w) + o, -1)  # noqa: E731
    program, taken = program_of(tmp_path, function, *inputs, tiling=Tiling(16, 16, 16, shared=4, sharers=5))
    assert len(program.steps) == 4
    launches = tuple(step for step in program.steps if isinstance(step, DeviceLaunch))
    together = dataclasses.replace(program, steps=(LaunchGraph(launches),), origins=())
    runs = ProgramRunner(program), ProgramRunner(together)
    first, *others = (run(taken)[0] for run in runs for _ in range(3))
    torch.testing.assert_close(first.double(), function(*(x.double() for x in inputs)), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(first, other) for other in others)


def test_few_with_keys_of_their_own(tmp_path: Path) -> None:
    """Results kept of one kernel are never taken for another's."""
    region, _ = compiled(tmp_path, torch.mm, torch.empty(64, 4096), torch.empty(4096, 96))
    (kernel,) = region.kernels.kernels
    found = alternatives(kernel, Target(90, 132))
    assert 1 <= len(found) <= 3
    assert len({variant.name for variant in found}) == len(found)
    texts = [canonical_text(each) for variant in (Variant("", (kernel,)), *found) for each in variant.kernels[:1]]
    assert len({*texts}) == len(texts)
    assert [variant.cost for variant in found] == sorted(variant.cost for variant in found)


def test_none_where_there_is_nothing_to_choose() -> None:
    """Other kernels have no alternatives, nor have the interpreter's large tiles."""
    for kernel in (row_sum_kernel(), attention_kernel()):
        assert alternatives(kernel, HOPPER) == []


def test_none_for_large_tiles(tmp_path: Path) -> None:
    region, _ = compiled(tmp_path, torch.mm, torch.empty(64, 4096), torch.empty(4096, 96))
    (kernel,) = region.kernels.kernels
    assert alternatives(kernel, INTERPRETER) == []
