"""Weights on their way through the cache: results are right, and what is read next is asked for."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, make
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 53, 3, 5), 171, (1, 1)),
        Case((3, 96, 3, 3), 80, (1, 1), blocked_x=False),
        Case((2, 37, 5, 3), 101, (3, 3), padding=1),
        Case((1, 96, 5, 5), 144, (3, 3), 2, 1, groups=3),
        Case((1, 70, 1, 1), 130, (1, 1), blocked_out=False),
        Case((1, 48, 7), 96, (5,), padding=2, dtype="bfloat16"),
    ],
)
def test_weights_larger_than_the_input_stream(case: Case, target: Target) -> None:
    """Small images: whatever tile, image, group or ragged block comes next, results are right."""
    check(case, target)


@pytest.mark.parametrize(("pixels", "streaming"), [((7, 7), True), ((56, 56), False)])
def test_streaming_weights_are_prefetched(pixels: tuple[int, int], streaming: bool) -> None:
    """A weight larger than the input asks for its next blocks, into the second-level cache; one that stays in the cache does not."""
    kernel, _, _ = make(Case((1, 64, *pixels), 128, (1, 1)), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    assert ("prefetcht1" in assembly) == streaming


@pytest.mark.parametrize(
    "case", [Case((1, 128, 7, 7), 96, (3, 3), padding=1), Case((2, 512, 5, 3), 64, (3, 3), 2, 1, groups=2)]
)
def test_chunks_of_weights_are_prefetched(case: Case) -> None:
    """The next chunk of input channels is asked for, and results are right whichever task, group or image comes next."""
    target = dataclasses.replace(HOST, l2_bytes=256 << 10)
    check(case, target)
    kernel, _, _ = make(case, target)
    assert "prefetcht1" in compile_kernel(kernel, rules.emit, target).inspect_source("asm")
