"""Expressions of schedules, run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, TirExpr

X = torch.tensor([-7, -1, 0, 1, 7, 300], dtype=torch.int32)


def lane_by_lane(of: Callable[[TirExpr], TirExpr], x: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    """Call `of` for each element, where an array keeps them as `dtype`."""
    out = torch.zeros(len(x), dtype=dtype)
    run_body(lambda b, a, to: b.loop(len(x), lambda i: b.store(to, i, of(b.load(a, i)))), x, out)
    return out.tolist()


@pytest.mark.parametrize(
    ("of", "want"),
    [
        (lambda x: tir.minimum(x, tir.const(1, "int32")), [-7, -1, 0, 1, 1, 1]),
        (lambda x: tir.maximum(x, tir.const(1, "int32")), [1, 1, 1, 1, 7, 300]),
        (lambda x: tir.truncdiv(x, tir.const(2, "int32")), [-3, 0, 0, 0, 3, 150]),
        (lambda x: tir.cast(tir.cast(x, "int8"), "int32"), [-7, -1, 0, 1, 7, 44]),
        (lambda x: tir.select(tir.equal(x, tir.const(0, "int32")), tir.const(9, "int32"), x), [-7, -1, 9, 1, 7, 300]),
        (lambda x: (x << tir.const(1, "int32")) & tir.const(7, "int32"), [2, 6, 0, 2, 6, 0]),
    ],
)
def test_integers(of: Callable[[TirExpr], TirExpr], want: list[int]) -> None:
    """Integers wrap, and are divided towards zero; shifts and bitwise operations are Python's operators."""
    assert lane_by_lane(of, X, torch.int32) == want


def test_logic() -> None:
    """Conjunction, disjunction and negation of comparisons."""
    zero, six = tir.const(0, "int32"), tir.const(6, "int32")
    tests = {
        "and": lambda x: tir.logical_and(x > zero, x < six),
        "or": lambda x: tir.logical_or(x < zero, x > six),
        "not": lambda x: tir.logical_not(tir.equal(x, zero)),
    }
    got = {
        name: lane_by_lane(lambda x, of=of: tir.select(of(x), tir.const(1, "int32"), zero), X, torch.int32)
        for name, of in tests.items()
    }
    assert got == {"and": [0, 0, 0, 1, 0, 0], "or": [1, 1, 0, 0, 1, 1], "not": [1, 1, 0, 1, 1, 1]}


def test_constants() -> None:
    """Numbers of any dtype; infinities and NaN are floats; a vector's dtype gives a number in every lane."""
    assert tir.const(True, "int32").value == 1
    assert tir.const(0xFFFF0000, "uint32").value == 0xFFFF0000
    assert tir.const(math.inf, "float32").value == math.inf
    assert math.isnan(tir.const(math.nan, "float64").value)
    assert isinstance(tir.const(1, "int16x32"), tirx.Broadcast)


def test_bits_stay_what_they_are() -> None:
    """A float's bits as an integer."""
    got = lane_by_lane(lambda x: tir.reinterpret(x, "int32"), torch.tensor([1.0, -0.0]), torch.int32)
    assert got == [0x3F800000, -0x80000000]


def test_vectors() -> None:
    """Lanes of two vectors are numbered one vector after the other; a ramp counts; a word repeats a number."""

    def body(b: Builder, a: Any, out: Any) -> Any:
        low, high = b.load_vector(a, 0, 2), b.load_vector(a, 2, 2)
        ramp = tir.ramp(tir.const(5, "int32"), tir.const(3, "int32"), 4)
        vectors = [
            tir.shuffle([low, high], [3, 0, 2, 1]),
            ramp,
            tir.broadcast(tir.const(8, "int32"), 4),
            tir.word_of(0x80, 4, 4),
        ]
        return b.seq(*[b.store_vector(out, 4 * n, vector, 4) for n, vector in enumerate(vectors)])

    out = torch.zeros(16, dtype=torch.int32)
    run_body(body, torch.tensor([10, 11, 12, 13], dtype=torch.int32), out)
    word = 0x80808080 - (1 << 32)
    assert out.tolist() == [13, 10, 12, 11, 5, 8, 11, 14, 8, 8, 8, 8, word, word, word, word]


@pytest.mark.parametrize(
    ("dtype", "size"), [("bool", 1), ("int8", 1), ("uint16", 2), ("float32", 4), ("int64", 8), ("float32x16", 64)]
)
def test_bytes_of_an_element(dtype: str, size: int) -> None:
    """A bool has a byte."""
    assert tir.itemsize(dtype) == size
