"""Storage of elements in arrays: every bit pattern of the half types, and bool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.storage import narrow, storage_dtype, widen


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("bool", "uint8"), ("bfloat16", "uint16"), ("float16", "float16"), ("float32", "float32"), ("int64", "int64")],
)
def test_dtypes_of_arrays(dtype: str, stored: str) -> None:
    """bool and bfloat16 are integers, every other dtype is itself."""
    assert storage_dtype(dtype) == stored


# A half type, and whether arithmetic converts it where there is no instruction for it.
HALF_TYPES = [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]


@pytest.mark.parametrize(("dtype", "computes"), HALF_TYPES)
def test_half_types_widen_exactly(dtype: torch.dtype, computes: bool) -> None:
    """Every bit pattern is the number that torch takes it for."""

    def widened(value: Any) -> Any:
        return widen(value, _name(dtype), computes_float16=computes)

    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    wide = torch.empty(x.shape)
    run_body(lambda b, a, o: _each(b, x, lambda i: b.store(o, i, widened(b.load(a, i)))), x, wide)
    torch.testing.assert_close(wide, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "computes"), HALF_TYPES)
def test_half_types_round_to_nearest_even(dtype: torch.dtype, computes: bool) -> None:
    """Half types are rounded as torch rounds: halves between two neighbours, numbers that become infinite or denormal; a NaN of any bits stays
    one."""

    def narrowed(value: Any) -> Any:
        return narrow(value, _name(dtype), computes_float16=computes)

    exact = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    half = (exact + exact.roll(-1)) / 2
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    x = torch.cat([exact, half, half * (1 + 2**-20), torch.tensor([3.39e38, 65519.9, 65520.0, 1e-40]), nans])
    out = torch.empty(x.shape, dtype=dtype)
    run_body(lambda b, a, o: _each(b, x, lambda i: b.store(o, i, narrowed(b.load(a, i)))), x, out)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_bool() -> None:
    """Whatever is not zero is true, and true is one."""
    x = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    out = torch.empty(4, dtype=torch.uint8)
    run_body(lambda b, a, o: _each(b, x, lambda i: b.store(o, i, narrow(widen(b.load(a, i), "bool"), "bool"))), x, out)
    assert out.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_other_dtypes_are_left_alone(dtype: str) -> None:
    """The very value, without a cast."""
    builder = Builder()
    value = builder.load(builder.local(1, dtype), 0)
    assert narrow(value, dtype) is value
    assert widen(value, dtype) is value


def _each(builder: Builder, x: torch.Tensor, body: Any) -> Any:
    return builder.loop(x.numel(), body)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
