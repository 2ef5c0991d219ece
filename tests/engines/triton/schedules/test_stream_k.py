"""Stream-K: that shares cover every step once, and what its two programs look like. Results: `test_alternatives.py`."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engines.triton.programs_for_tests import HOPPER, run_program
from tests.engines.triton.regions_for_tests import kernel_of
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.schedules.tilings import Shares, Tiling, shares_of
from torch_hybrid_backend.loops.kernels import MatMulKernel

pytest.importorskip("triton")


def _sums(shares: Shares) -> dict[int, tuple[int, int, int]]:
    """By its place, each sum that the first kernel stores: of which tile, from which step to which. As its programs find them."""
    found: dict[int, tuple[int, int, int]] = {}
    for program in range(shares.programs):
        at = program * shares.each
        stop = min(at + shares.each, shares.shared * shares.steps)
        while at < stop:
            tile, begin = divmod(at, shares.steps)
            end = min(begin + stop - at, shares.steps)
            assert program + tile not in found
            found[program + tile] = tile, begin, end
            at += end - begin
    return found


def test_shares_cover_every_step_once() -> None:
    """In places of their own, all there are but where programs and tiles end together; those that a tile's sums are read from have its steps in
    order. Programs have equal shares, but the last one."""
    for shared, steps, sharers in itertools.product((1, 2, 5, 7), (1, 3, 8, 9), (1, 2, 5, 12, 60)):
        shares = shares_of(Tiling(16, 16, 16, shared=shared, sharers=sharers), shared + 4, steps)
        assert shares.whole == 4
        assert shares.programs <= sharers
        found = _sums(shares)
        assert max(found) < shares.sums
        for tile in range(shared):
            begin, end = (
                tile * steps // shares.each,
                (tile * steps + steps - 1) // shares.each + 1,
            )  # as the second kernel does
            parts = [found[program + tile] for program in range(begin, end)]
            assert {part[0] for part in parts} == {tile}
            covered = [step for _, first, last in parts for step in range(first, last)]
            assert covered == [*range(steps)]


def test_whole_tiles_have_the_epilogue_at_once() -> None:
    """The first kernel stores nothing of shared tiles but sums; the second one touches no other tile, and reads nothing of the operands."""
    x, w, bias = torch.randn(32, 64), torch.randn(40, 64), torch.randn(40)
    kernel = kernel_of(lambda x, w, b: torch.nn.functional.linear(x, w, b).relu(), x, w, bias)
    assert isinstance(kernel, MatMulKernel)
    first, second = tiled(kernel, Tiling(16, 16, 16, shared=2, sharers=3))
    memory = dict(zip((read.buffer for read in kernel.reads), (x, w, bias), strict=True))
    exact = torch.nn.functional.linear(x.double(), w.double(), bias.double()).relu()
    out, partial = run_program(first, memory)
    torch.testing.assert_close(out[:, :32].double(), exact[:, :32], rtol=1e-5, atol=1e-5)
    assert (out[:, 32:] == 77).all()
    (rest,) = run_program(second, {**memory, first.writes[1].buffer: partial})
    assert (rest[:, :32] == 77).all()
    torch.testing.assert_close(rest[:, 32:].double(), exact[:, 32:], rtol=1e-5, atol=1e-5)
    assert len(second.reads) == 2


def test_programs_of_shares_alone() -> None:
    """Programs store only sums where no round of whole tiles is full."""
    kernel = kernel_of(torch.mm, torch.empty(32, 64), torch.empty(64, 32))
    assert isinstance(kernel, MatMulKernel)
    first, _ = tiled(kernel, Tiling(16, 16, 16, shared=4, sharers=6))
    text = emit_kernel(first, "kernel", HOPPER).text
    assert text.count("tl.store(") == 1
    assert "if program < WHOLE:" not in text
