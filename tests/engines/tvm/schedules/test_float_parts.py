"""float32 as parts of bfloat16: what they add up to, and which numbers are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.tvm.schedule_runner import run_body
from torch_hybrid_backend.engines.tvm.cpu.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.tvm.schedules.float_parts import FloatParts, word
from torch_hybrid_backend.engines.tvm.tir.printer import Printer


def split(values: torch.Tensor, parts: int) -> tuple[torch.Tensor, bool]:
    """(16 * n) float32: their parts, (parts, 16 * n) bfloat16, and whether one cannot be split."""
    bits, outside = torch.zeros(parts, len(values), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def body(b: Any, array: Any, out: Any, flag: Any) -> Any:
        from tvm import tirx

        printer = Printer(b, {})
        own = FloatParts(b, printer, parts)

        def vector(i: Any) -> Any:
            def one(lane: Any) -> Any:
                at = i * 16 + lane

                def put(number: int, upper: Any) -> Any:
                    kept = tirx.bitwise_and(upper, word(0xFFFF0000))
                    return b.store(out, at + number * len(values), tirx.reinterpret("int32", kept))

                return own.split(lane, b.load(array, at), put)

            return printer.vector_loop(16, one)

        mark = b.store(flag, 0, tirx.IntImm("int32", 1))
        return b.seq(own.begin(), b.loop(len(values) // 16, vector), own.when_outside(mark))

    run_body(body, values, bits.view(-1), outside)
    return bits.view(torch.float32), bool(outside[0])


@pytest.mark.parametrize(("parts", "error"), [(3, 0.0), (2, 2.0**-16)])
def test_parts_add_up(parts: int, error: float) -> None:
    """Three are exact, two within 2^-16; each is a bfloat16, and far smaller than the one before."""
    torch.manual_seed(0)
    values = torch.randn(64) * torch.exp2(torch.randint(-20, 20, (64,)))
    values[::7] = 0
    found, is_outside = split(values, parts)
    assert not is_outside
    assert torch.equal(found.bfloat16().float(), found)
    assert ((found.double().sum(0) - values.double()).abs() <= error * values.double().abs()).all()
    assert (found[1].abs() <= 2.0**-8 * found[0].abs()).all()


def test_numbers_outside_are_noticed() -> None:
    """One among many is enough; those at the limits are inside."""
    values = torch.full((48,), SMALLEST)
    values[3], values[40] = -LARGEST, 0
    assert not split(values, 3)[1]
    for number in (float("inf"), float("nan"), -1.0001 * LARGEST, SMALLEST * 0.999, 1e-45):
        values[17] = number
        assert split(values, 3)[1], number
