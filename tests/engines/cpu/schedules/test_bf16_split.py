"""float32 as parts of bfloat16: what they add up to, and which numbers are noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, run_body
from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import FloatParts
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.printer import Printer

# By integer arithmetic, and by the instruction where this processor has it.
TARGETS = [dataclasses.replace(HOST, features=())]
if "avx512_bf16" in HOST.features:
    TARGETS.append(HOST)


def split(values: torch.Tensor, parts: int, target: Target) -> tuple[torch.Tensor, bool]:
    """(16 * n) float32: their parts, (parts, 16 * n) bfloat16, and whether one cannot be split."""
    bits, outside = torch.zeros(parts, len(values), dtype=torch.uint16), torch.zeros(1, dtype=torch.int32)

    def body(b: Any, array: Any, out: Any, flag: Any) -> Any:
        from tvm import tirx

        printer = Printer(b, {})
        own = FloatParts(b, printer, parts, target)

        def vector(i: Any) -> Any:
            return own.stored(
                16, lambda lane: b.load(array, i * 16 + lane), lambda number: (out, i * 16 + number * len(values))
            )

        mark = b.store(flag, 0, tirx.IntImm("int32", 1))
        return b.seq(own.begin(), b.loop(len(values) // 16, vector), own.when_outside(mark))

    run_body(body, values, bits.view(-1), outside)
    return bits.view(torch.bfloat16).float(), bool(outside[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("parts", "error"), [(3, 0.0), (2, 2.0**-16)])
def test_parts_add_up(parts: int, error: float, target: Target) -> None:
    """Three are exact, two within 2^-16; each is a bfloat16, and far smaller than the one before."""
    torch.manual_seed(0)
    values = torch.randn(64) * torch.exp2(torch.randint(-20, 20, (64,)))
    values[::7] = 0
    found, is_outside = split(values, parts, target)
    assert not is_outside
    assert torch.equal(found[0], values.bfloat16().float())
    assert ((found.double().sum(0) - values.double()).abs() <= error * values.double().abs()).all()
    assert (found[1].abs() <= 2.0**-8 * found[0].abs()).all()


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_outside_are_noticed(target: Target) -> None:
    """A number outside among many is noticed; those at the limits are inside."""
    values = torch.full((48,), SMALLEST)
    values[3], values[40] = -LARGEST, 0
    assert not split(values, 3, target)[1]
    for number in (float("inf"), float("nan"), -1.0001 * LARGEST, SMALLEST * 0.999, 1e-45):
        values[17] = number
        assert split(values, 3, target)[1], number
