"""Attention on AMX's tiles, emulated, against float64 eager, beside eager in bfloat16; its machine code is looked at."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import HOST, compile_kernel, runner_of
from tests.engines.cpu.schedules.attention.attention_for_tests import check_bf16, in_bf16, make
from tests.engines.cpu.schedules.attention.test_bf16 import masks
from torch_hybrid_backend.engines.cpu.schedules.attention import rules

__all__ = ["emulated"]  # the fixture

# This machine, with the vectors of a processor that has AMX; without its own instruction that rounds to bfloat16.
_HOST = dataclasses.replace(HOST, lanes=16, cores=3)
_PLAIN = dataclasses.replace(_HOST, features=tuple(f for f in HOST.features if f != "avx512_bf16"))


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ((1, 2, 70, 90, 64, 64), False),  # rows and keys left over
        ((2, 1, 40, 37, 20, 24), True),  # heads that are less than a step, an odd number of keys
        ((1, 1, 5, 7, 8, 8), False),  # less than a tile of everything
        ((1, 1, 50, 1100, 80, 40), False),  # several steps and a rest, blocks of keys
        pytest.param((1, 1, 1100, 1100, 16, 16), True, marks=pytest.mark.full),
    ],
)
def test_is_as_exact_as_eager(emulated: ctypes.CDLL, shape: tuple[int, int, int, int, int, int], causal: bool) -> None:
    """(B, H, S, T, D, E); with every core's tiles released."""
    before = emulated.products_so_far()
    check_bf16(shape, form="bfloat16", causal=causal, heads_inside=True, target=_HOST)
    assert emulated.products_so_far() > before


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_known_at_run_time(emulated: ctypes.CDLL, causal: bool) -> None:
    """A kernel serves any number of queries, keys and batches: less than a tile, panels that are whole and not, several blocks of keys."""
    kernel, _ = make((1, 2, 40, 40, 24, 20), dtype="bfloat16", causal=causal, open_sizes=True)
    attention = runner_of(in_bf16(kernel, "bfloat16"), rules.emit, _HOST)
    for batch, queries, keys in [
        (1, 40, 40),
        (2, 70, 90),
        (1, 1, 7),
        (1, 16, 32),
        (3, 33, 64),
        (1, 64, 1100),
        (0, 5, 5),
    ]:
        own, inputs = make((batch, 2, queries, keys, 24, 20), dtype="bfloat16", causal=causal)
        q, k, v = (value.double() for value in inputs.values())
        before = emulated.products_so_far()
        (got,) = attention({read.buffer: inputs[o.buffer] for read, o in zip(kernel.reads, own.reads, strict=True)})
        assert (emulated.products_so_far() > before) == (batch > 0)
        want = 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_masked(emulated: ctypes.CDLL) -> None:
    """Infinities, a query that sees nothing; weights rounded without an instruction of their own."""
    for target in (_HOST, _PLAIN):
        check_bf16((1, 2, 70, 90, 64, 64), form="bfloat16", mask=masks(), target=target)


def test_machine_code() -> None:
    """Compiled for a processor with AMX: configured and released once, after memory is taken; products meet no vector in their loops."""
    kernel, _ = make((1, 16, 128, 512, 64, 64), dtype="bfloat16", heads_inside=True)
    assembly = compile_kernel(in_bf16(kernel, "bfloat16"), rules.emit, SAPPHIRE_RAPIDS).inspect_source("asm")
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1
    configured, released = assembly.index("\tldtilecfg\t"), assembly.index("\ttilerelease")
    assert "BackendAllocWorkspace" not in assembly[configured:released]
    products = [place.start() for place in re.finditer(r"\ttdpbf16ps\t", assembly)]
    assert len(products) >= 3 * 4
    assert configured < products[0]
    assert products[-1] < released
    # Of four products in a row: the four tiles of sums of one step.
    for first, last in zip(products[::4], products[3::4], strict=True):
        assert not re.search(r"[xyz]mm\d", assembly[first:last].replace("tmm", "")), assembly[first:last]
