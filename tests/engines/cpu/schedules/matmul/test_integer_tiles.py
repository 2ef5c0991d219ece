"""Tiles of many rows that are multiplied as integers with weights of 8 and 4 bits."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Sequence

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel, run_kernel
from tests.engines.cpu.schedules.matmul.test_integer_rows import VEX, VNNI
from tests.engines.cpu.schedules.matmul.test_weight_only import check, kernel_of, packed_weight
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only
from torch_hybrid_backend.engines.cpu.target import Target

# Whose caches hold a few rows: blocks of them, shared among tasks; with more cores than rows, too.
SMALL = dataclasses.replace(HOST, cores=3, l2_bytes=32 << 10)
MANY = dataclasses.replace(HOST, cores=48, l2_bytes=8 << 10)


_ROWS = {
    "host": (HOST, (2, 7, 130)),  # less than a tile, more than one, several blocks
    "host, more": (HOST, (4, 33)),
    "small": (SMALL, (7, 130)),
    "many": (MANY, (7, 130)),
    "narrow": (NARROW, (7, 130)),
}
# The fewest and the most parts for the host's caches, one number of them for each of the others: a target changes the loops around a tile, the
# parts change the tile. The next test has rows of two parts.
_QUICK = {("host", 1), ("host", 3), ("small", 3), ("many", 1), ("narrow", 1)}


@pytest.mark.parametrize(
    ("target", "rows", "row_parts"),
    [
        pytest.param(*case, parts, id=f"{name}-{parts}", marks=() if (name, parts) in _QUICK else pytest.mark.full)
        for name, case in _ROWS.items()
        for parts in (1, 2, 3)
    ],
)
def test_many_rows(target: Target, rows: Sequence[int], row_parts: int) -> None:
    """Tiles of any number of rows, in one block and in several, with zero points and without; groups of k, and whole rows of it."""
    for m in rows:
        check(kernel_of(m, 96, 37, target, 4, 32, scaled_by="bfloat16", row_parts=row_parts), target)
        check(kernel_of(m, 1152, 97, target, 4, 128, zeros=True, row_parts=row_parts), target)
        check(kernel_of(m, 768, 64, target, 8, in_words=True, row_parts=row_parts), target)
        check(kernel_of(m, 544, 70, target, 8, 32, zeros=True, in_words=True, row_parts=row_parts), target)


@pytest.mark.parametrize("row_parts", [1, 2, 3])
def test_many_rows_of_which_one_is_special(row_parts: int) -> None:
    """An infinity, a NaN, or a number that is too large or too small makes the rows of its task float32's: each gives what it does in eager."""
    m, k, n, tile = 40, 64, 48, 2 * HOST.lanes
    kernel = kernel_of(m, k, n, HOST, 8, 32, in_words=True, row_parts=row_parts)
    a, weight, scales, bias, residual = (argument.buffer for argument in kernel.reads)
    torch.manual_seed(0)
    q = torch.randint(1, 128, (1, k, n)) * torch.tensor([1, -1]).repeat(n // 2)
    inputs = {weight: packed_weight(q, kernel.weight), scales: pack_b(torch.full((1, 2, n), 0.125), tile)}
    inputs |= {bias: torch.zeros(n), residual: torch.ones(1, m, n)}
    for special in (torch.inf, -torch.inf, torch.nan, 1e36, 1e-42):
        x = torch.randn(1, m, k)
        x[0, 17, 33:] = 0
        x[0, 17, 33] = special
        (got,) = run_kernel(kernel, weight_only.emit, {**inputs, a: x})
        # Rows that are rounded in other tasks: half a step, of 4 / 32512 or of 4 / 127, times the sum of 64 weights of up to 16.
        atol = {1: 16, 2: 0.06, 3: 1e-4}[row_parts]
        torch.testing.assert_close(got, torch.relu(x @ (q * 0.125)), rtol=1e-5, atol=atol, equal_nan=True)


# (the weights' bits, those of rows' numbers in bytes) -> rows of a tile. Two bytes by narrow vectors: a group's sums leave no room for more.
TILES = {
    VNNI: {(8, 1): 5, (8, 2): 6, (8, 3): 4, (4, 1): 5, (4, 2): 3, (4, 3): 3},
    VEX: {(8, 1): 2, (8, 2): 2, (4, 1): 2},
}


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="looks for x86's instructions")
@pytest.mark.parametrize(
    ("target", "bits", "row_parts"), [(target, *form) for target, forms in TILES.items() for form in forms]
)
def test_machine_code_of_many_rows(target: Target, bits: int, row_parts: int) -> None:
    """A tile has as many sums as there are registers for: none is on the stack while its words are multiplied."""
    rows = TILES[target][bits, row_parts]
    kernel = kernel_of(rows * 8, 512, 128, target, bits, 32 if bits == 4 else 0, in_words=True, row_parts=row_parts)
    assembly = compile_kernel(kernel, weight_only.emit, target).inspect_source("asm")
    loops = [block for block in re.split(r"\n\.LBB", assembly) if block.count("vpdpbusd") >= 2 * row_parts * rows]
    assert loops
    for block in loops:
        products = [m.start() for m in re.finditer(r"vpdpbusd\s", block)]
        inner = block[products[0] : products[-1]]
        assert not re.findall(r"vmov\w+\s+%[yz]mm\d+, -?\d*\(%rsp\)", inner)


def test_what_has_no_tiles() -> None:
    """By narrow vectors weights of 4 bits meet rows of one byte alone, as sums of groups leave no registers for more."""
    for bits, row_parts in ((8, 3), (4, 2), (4, 3)):
        kernel = kernel_of(16, 512, 128, VEX, bits, 32 if bits == 4 else 0, in_words=True, row_parts=row_parts)
        assert "vpdpbusd" not in compile_kernel(kernel, weight_only.emit, VEX).inspect_source("asm")
