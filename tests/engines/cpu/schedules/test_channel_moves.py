"""Copies that move channels between the lanes of blocked tensors, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel, run_kernel
from tests.engines.cpu.schedules.test_elementwise import kernel_of, random, tensor
from torch_hybrid_backend.engines.cpu.schedules import elementwise
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.kernels import Argument, MapKernel
from torch_hybrid_backend.loops.layout import Blocked


def shuffled(
    channels: int, side: tuple[int, ...], groups: int, layout: Blocked
) -> tuple[MapKernel, Argument, Argument]:
    """Two tensors of `channels`, concatenated, then shuffled in `groups`."""
    a, b = (tensor((2, channels, *side), "float32", layout) for _ in range(2))

    def value(index: tuple[Index, ...]) -> Expr:
        n, c, *pixel = index
        source = c % groups * (2 * channels // groups) + c // groups
        first, second = a.buffer.at((n, source, *pixel)), b.buffer.at((n, source - channels, *pixel))
        return ops.guard(ops.index_in(source, 0, channels), first, second)

    return kernel_of((2, 2 * channels, *side), [a, b], [("float32", layout, value)]), a, b


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(("channels", "groups"), [(58, 2), (16, 2), (5, 5), (33, 3), (29, 2), (64, 8)])
@pytest.mark.parametrize("side", [(3, 5), (1, 1), (7,)])
def test_concatenation_and_shuffle(channels: int, groups: int, side: tuple[int, ...], target: Target) -> None:
    """ShuffleNet's: odd channels, several groups, one and two spatial dimensions, blocks of 8 and 16."""
    kernel, a, b = shuffled(channels, side, groups, Blocked(target.lanes))
    x, y = random(a.buffer.shape, "float32"), random(b.buffer.shape, "float32")  # type: ignore[arg-type]
    (got,) = run_kernel(kernel, elementwise.emit, {a.buffer: x, b.buffer: y}, target)
    want = torch.cat([x, y], 1).unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("start", "channels"), [(58, 58), (3, 17), (16, 32), (0, 20), (115, 1)])
def test_slice(start: int, channels: int) -> None:
    """Some of the channels, from anywhere in a block."""
    layout = Blocked(HOST.lanes)
    a = tensor((1, 116, 4, 3), "float32", layout)
    kernel = kernel_of(
        (1, channels, 4, 3), [a], [("float32", layout, lambda i: a.buffer.at((i[0], i[1] + start, *i[2:])))]
    )
    x = random(a.buffer.shape, "float32")  # type: ignore[arg-type]
    (got,) = run_kernel(kernel, elementwise.emit, {a.buffer: x})
    torch.testing.assert_close(got, x[:, start : start + channels], rtol=0, atol=0)


def test_lanes_are_permuted_in_registers() -> None:
    """A block of the result is made of whole vectors."""
    if HOST.lanes < 16:
        pytest.skip("instruction names of AVX-512")
    kernel, _, _ = shuffled(58, (28, 28), 2, Blocked(16))
    assembly = compile_kernel(kernel, elementwise.emit).inspect_source("asm")
    assert "vpermt2ps" in assembly or "vpermi2ps" in assembly
    assert "vpinsrd" not in assembly
    assert "vinsertps" not in assembly
