"""The measured ceilings: the arithmetic on them, and that the kernels run on any number of threads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import roofline
from torch_hybrid_backend.engines.tvm.target import Target


def test_the_higher_of_two_ceilings_decides() -> None:
    """Much arithmetic on few bytes takes the time of the arithmetic, and the other way round."""
    peak = roofline.Peak(1, 100.0, {"L2": {"read": 50.0, "copy": 20.0}, "memory": {"read": 10.0}})
    assert peak.seconds(2e9, 1e6) == pytest.approx(0.02)
    assert peak.seconds(1e6, 2e9) == pytest.approx(0.2)
    assert peak.seconds(1e6, 2e9, "L2") == pytest.approx(0.04)


def test_a_precision_has_the_ceiling_of_its_products() -> None:
    """The fastest instruction of the kind; bfloat16 without one is computed in float32, integers without one have no known ceiling."""
    peak = roofline.Peak(1, 100.0, {}, {"vpdpbusd": 400.0, "vdpbf16ps": 200.0, "tdpbf16ps": 1600.0})
    assert [peak.rate(p) for p in ("float32", "int8-weights", "bf16", "int8")] == [100.0, 100.0, 1600.0, 400.0]
    assert roofline.Peak(1, 100.0, {}, {"vpmaddubsw": 180.0, "vpmaddwd": 140.0}).rate("int8") == 180.0
    without = roofline.Peak(1, 100.0, {})
    assert [without.rate(p) for p in ("bf16", "int8+bf16")] == [100.0, 0.0]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernels_compute(threads: int) -> None:
    """Every thread's part is done: the multiply-adds end at a fixed point, reads add up, writes arrive."""
    lanes = Target.host().lanes
    fma = roofline._fma(threads, lanes, 8)
    fma._inputs[0].fill_(0.5)
    fma()
    torch.testing.assert_close(fma._inputs[1], torch.ones(threads * 8 * lanes))
    read = roofline._stream("read", threads, lanes, 16 * 8 * lanes, 3)
    read()
    torch.testing.assert_close(read._inputs[1], torch.full((threads * 8 * lanes,), 48.5))
    copy = roofline._stream("copy", threads, lanes, 16 * 8 * lanes, 3)
    copy()
    torch.testing.assert_close(copy._inputs[1], torch.full((threads * 8 * 8 * lanes,), 3.0))


def test_kept_ceilings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's file spares measuring."""
    file = tmp_path / "roofline.json"
    file.write_text(json.dumps({"peaks": [{"threads": 3, "gflops": 7.0, "gbytes": {"memory": {"read": 1.0}}}]}))
    monkeypatch.setattr(roofline, "path", lambda: file)
    assert roofline.known_peak(3).gflops == 7.0


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
    if roofline.PRODUCTS[instruction][0] not in roofline._target().features:
        pytest.skip(f"this machine has no {instruction}")
    monkeypatch.setattr(roofline, "_FMA_STEPS", 5)
    kernel = roofline._vector_products(instruction, 2, 8)
    operands = kernel._inputs[0].view(dtype)
    operands.fill_(3)
    kernel()
    sums = kernel._inputs[1] if dtype == torch.bfloat16 else kernel._inputs[1].view(torch.int32)
    assert sums.eq(5 * products * 9).all()


def test_what_a_machine_lacks_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions of extensions that it has not, or that Linux forbids the process, are not run."""
    target = dataclasses.replace(roofline._target(), features=("avx",))
    monkeypatch.setattr(roofline, "_target", lambda: target)
    assert roofline._products(1) == {}


@pytest.mark.skipif("amx_bf16" not in roofline._target().features, reason="needs AMX")
@pytest.mark.parametrize("instruction", ["tdpbusd", "tdpbf16ps"])
def test_tiles_compute(instruction: str) -> None:
    """Every thread's four tiles of sums are written."""
    kernel = roofline._tile_products(instruction, 2)
    kernel._inputs[1].fill_(-1.0)
    kernel()
    assert (kernel._inputs[1] != -1.0).all()
