"""Attention of float32 on AMX's tiles, emulated, against float64 eager, beside eager; numbers that cannot be split."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import pytest
import torch

from tests.engines.cpu.amx_for_tests import ODD_NUMBERS, SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import HOST, compile_kernel, to_memory
from tests.engines.cpu.schedules.attention.attention_for_tests import check_bf16, in_bf16, make
from tests.engines.cpu.schedules.attention.test_bf16 import masks
from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.schedules.attention import rules

__all__ = ["emulated"]  # the fixture

# This machine, with the vectors of a processor that has AMX.
_HOST = dataclasses.replace(HOST, lanes=16, cores=2)


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ((1, 2, 70, 90, 64, 64), False),  # rows and keys left over
        ((2, 1, 40, 37, 20, 24), True),  # less than a step, less than a vector of values, an odd number of keys
        pytest.param((1, 1, 6, 1, 8, 40), False, marks=pytest.mark.full),  # one key
        ((1, 1, 50, 1100, 80, 40), False),  # several steps and a rest, blocks of keys
    ],
)
def test_is_no_less_exact_than_eager(
    emulated: ctypes.CDLL, shape: tuple[int, int, int, int, int, int], causal: bool
) -> None:
    """(B, H, S, T, D, E); three parts, with every core's tiles released."""
    before = emulated.products_so_far()
    check_bf16(shape, form="float32", causal=causal, heads_inside=True, target=_HOST)
    assert emulated.products_so_far() > before


@pytest.mark.parametrize("form", ["float16 split", "float32 high", pytest.param("float32", marks=pytest.mark.full)])
def test_masked(emulated: ctypes.CDLL, form: str) -> None:
    """Infinities, a query that sees nothing."""
    check_bf16((1, 2, 70, 90, 32, 32), form=form, mask=masks(), target=_HOST)


def test_numbers_that_cannot_be_split(emulated: ctypes.CDLL) -> None:
    """A number in a query that cannot be split costs its tile of rows the tiles, one in a key or a value its head; what comes out is eager's in
    float64."""
    kernel, inputs = make((1, 2, 70, 40, 16, 16))
    function = compile_kernel(in_bf16(kernel, "float32"), rules.emit, _HOST)["kernel"]

    def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        before = emulated.products_so_far()
        memory = [to_memory(x, read.layout) for x, read in zip(values, kernel.reads, strict=True)]
        out = torch.full((kernel.writes[0].span,), 77.0)
        function(*memory, out)
        return out, emulated.products_so_far() - before

    _, all_products = run(list(inputs.values()))
    for number, place in itertools.product(ODD_NUMBERS, range(3)):
        values = [x.clone() for x in inputs.values()]
        values[place][0, 1, 39, 3] = number
        got, products = run(values)
        want = 2 * torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in values))
        assert 0 < products < all_products
        assert (products > all_products // 2) == (place == 0)
        torch.testing.assert_close(got.view(want.shape).double(), want, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_at_the_limits(emulated: ctypes.CDLL) -> None:
    """Numbers at the ends of what can be split, and zeros, are multiplied on tiles, and weights that vanish beside them."""
    kernel, inputs = make((1, 1, 40, 40, 16, 16))
    q, k, v = inputs.values()
    values = [torch.sign(q) * SMALLEST, torch.sign(k) * LARGEST, v * 0]
    values[1][..., ::3, :] = 0
    values[2][..., 5, :] = LARGEST
    values[2][..., 9, :] = SMALLEST
    before = emulated.products_so_far()
    function = compile_kernel(in_bf16(kernel, "float32"), rules.emit, _HOST)["kernel"]
    out = torch.full((kernel.writes[0].span,), 77.0)
    function(*[to_memory(x, read.layout) for x, read in zip(values, kernel.reads, strict=True)], out)
    assert emulated.products_so_far() > before
    want = 2 * torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in values))
    torch.testing.assert_close(out.view(want.shape).double(), want, rtol=1e-5, atol=0)


def test_machine_code() -> None:
    """Compiled for a processor with AMX: one configuration, the tiles' products, and float32's for numbers that cannot be split."""
    kernel, _ = make((1, 16, 128, 128, 64, 64), heads_inside=True)
    assembly = compile_kernel(in_bf16(kernel, "float32"), rules.emit, SAPPHIRE_RAPIDS).inspect_source("asm")
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1
    configured, released = assembly.index("\tldtilecfg\t"), assembly.index("\ttilerelease")
    assert "BackendAllocWorkspace" not in assembly[configured:released]
    assert assembly.count("\ttdpbf16ps\t") >= 6 * 4 * 2
    assert "\tvfmadd" in assembly
