"""The measured ceilings: the arithmetic on them, and that the kernels run on any number of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_hybrid_backend.engines.cpu import ceilings
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.runtime.program_runner import ProgramRunner


def test_the_higher_of_two_ceilings_decides() -> None:
    """Much arithmetic on few bytes takes the time of the arithmetic, and the other way round."""
    peak = ceilings.Peak(1, 100.0, {"L2": {"read": 50.0, "copy": 20.0}, "memory": {"read": 10.0}})
    assert peak.seconds(2e9, 1e6) == pytest.approx(0.02)
    assert peak.seconds(1e6, 2e9) == pytest.approx(0.2)
    assert peak.seconds(1e6, 2e9, "L2") == pytest.approx(0.04)


def test_a_precision_has_the_ceiling_of_its_products() -> None:
    """The fastest instruction of the kind; bfloat16 without one is computed in float32, integers without one have no known ceiling."""
    peak = ceilings.Peak(1, 100.0, {}, {"vpdpbusd": 400.0, "vdpbf16ps": 200.0, "tdpbf16ps": 1600.0})
    assert [peak.rate(p) for p in ("float32", "int8-weights", "bf16", "int8")] == [100.0, 100.0, 1600.0, 400.0]
    assert ceilings.Peak(1, 100.0, {}, {"vpmaddubsw": 180.0, "vpmaddwd": 140.0}).rate("int8") == 180.0
    without = ceilings.Peak(1, 100.0, {})
    assert [without.rate(p) for p in ("bf16", "int8+bf16")] == [100.0, 0.0]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernels_compute(threads: int) -> None:
    """Every thread's part is done: the multiply-adds end at a fixed point, reads add up, writes arrive."""
    lanes = Target.host().lanes
    fma = ceilings._fma(ProgramRunner, threads, lanes, 8)
    fma._inputs[0].fill_(0.5)
    fma()
    torch.testing.assert_close(fma._inputs[1], torch.ones(threads * 8 * lanes))
    read = ceilings._stream(ProgramRunner, "read", threads, lanes, 16 * 8 * lanes, 3)
    read()
    torch.testing.assert_close(read._inputs[1], torch.full((threads * 8 * lanes,), 48.5))
    copy = ceilings._stream(ProgramRunner, "copy", threads, lanes, 16 * 8 * lanes, 3)
    copy()
    torch.testing.assert_close(copy._inputs[1], torch.full((threads * 8 * 8 * lanes,), 3.0))


@pytest.mark.parametrize(
    ("instruction", "dtype", "products"),
    [
        ("vpdpbusd", torch.int8, 4),
        ("vpmaddubsw", torch.int8, 4),
        ("vpmaddwd", torch.int16, 2),
        ("vdpbf16ps", torch.bfloat16, 2),
    ],
)
def test_products_of_narrow_numbers_compute(
    instruction: str, dtype: torch.dtype, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step adds four products of bytes, or two of 16 bits, to each sum."""
    if not ceilings.has(instruction):
        pytest.skip(f"this machine has no {instruction}")
    monkeypatch.setattr(ceilings, "_FMA_STEPS", 5)
    kernel = ceilings._vector_products(ProgramRunner, instruction, 2, 8)
    operands = kernel._inputs[0].view(dtype)
    operands.fill_(3)
    kernel()
    sums = kernel._inputs[1] if dtype == torch.bfloat16 else kernel._inputs[1].view(torch.int32)
    assert sums.eq(5 * products * 9).all()


def test_what_a_machine_lacks_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions of extensions that it has not, or that Linux forbids the process, are not run."""
    target = dataclasses.replace(ceilings._target(), features=("avx",), lanes=4)
    monkeypatch.setattr(ceilings, "_target", lambda: target)
    assert ceilings._products(ProgramRunner, 1) == {}


@pytest.mark.skipif("amx_bf16" not in ceilings._target().features, reason="needs AMX")
@pytest.mark.parametrize("instruction", ["tdpbusd", "tdpbf16ps"])
def test_tiles_compute(instruction: str) -> None:
    """Every thread's four tiles of sums are written."""
    kernel = ceilings._tile_products(ProgramRunner, instruction, 2)
    kernel._inputs[1].fill_(-1.0)
    kernel()
    assert (kernel._inputs[1] != -1.0).all()


def test_rates_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; what the processor has no instructions for has none."""
    monkeypatch.setattr(ceilings, "_FMA_STEPS", 5)
    monkeypatch.setattr(ceilings, "_MEMORY_BYTES", 1 << 16)
    threads = torch.get_num_threads()
    found = ceilings.rates(ProgramRunner, threads, ["float32", ceilings.MEMORY])
    assert set(found) == {"float32", ceilings.MEMORY}
    assert all(rate > 0 for rate in found.values())
    target = dataclasses.replace(ceilings._target(), features=(), lanes=4)
    monkeypatch.setattr(ceilings, "_target", lambda: target)
    found = ceilings.rates(ProgramRunner, threads, ["bfloat16", "int8"])
    assert set(found) == {"float32", "bfloat16"}
    assert found["bfloat16"] == found["float32"]
