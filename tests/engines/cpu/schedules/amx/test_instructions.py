"""Tile registers: the statements run on the emulation, and become AMX's instructions."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.schedules.amx import instructions
from torch_hybrid_backend.engines.cpu.target import tvm_target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.pipeline import build

__all__ = ["emulated"]  # the fixture


def one_product(b: Builder, left: Any, right: Any, sums: Any, name: str = "tdpbf16ps") -> Any:
    """sums (16, 16) += left (16, 32) @ right, of pairs of k; what was there is 64 bytes a row."""
    array = instructions.configuration(b)
    return b.seq(
        b.alloc(array),
        instructions.configure(b, array),
        instructions.load(b, 0, sums, 0, 64),
        instructions.load(b, 4, left, 0, 64),
        instructions.zero(6),
        instructions.load(b, 6, right, 0, 64),
        instructions.multiply(name, 0, 4, 6),
        instructions.store(b, 0, sums, 0, 64),
        instructions.release(),
    )


def test_a_product(emulated: ctypes.CDLL) -> None:
    """A tile of sums gets the product of two tiles added, pairs of k side by side; denormal numbers count as zero."""
    torch.manual_seed(0)
    a, b, start = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randn(16, 16)
    a[3] = 1e-39
    right = b.reshape(16, 2, 16).permute(0, 2, 1).contiguous()
    sums = start.clone()
    run_body(one_product, a.flatten(), right.flatten(), sums.flatten())
    want = start.double() + a.double() @ b.double()
    torch.testing.assert_close(sums.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums[3], start[3])
    assert emulated.configured_threads_now() == 0


def test_instructions() -> None:
    """Compiled for a processor with AMX, each statement is its one instruction, on the register that it names."""
    b = Builder()
    arrays = [argument(512, "uint16", "a"), argument(512, "uint16", "b"), argument(256, "float32", "c")]
    function = prim_func("body", arrays, one_product(b, *arrays))
    assembly = build("body", function, tvm_target(SAPPHIRE_RAPIDS)).inspect_source("asm")
    order = ["ldtilecfg", "tileloadd", "tileloadd", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"]
    found = [line.split() for line in assembly.splitlines() if line.strip().startswith(("tile", "ldtile", "tdp"))]
    assert [words[0] for words in found] == order
    assert found[5][1:] == ["%tmm6,", "%tmm4,", "%tmm0"]
