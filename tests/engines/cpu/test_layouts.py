"""Buffers that lie in blocks of channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def convolution(x: torch.Tensor, w: torch.Tensor, groups: int = 1) -> torch.Tensor:
    return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)


def written(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, target: Target = _AVX512) -> list[Layout]:
    """The layouts of what the region's kernels write, in their order."""
    found = assemble(region_of(function, *inputs), TvmBackend(target))
    return [write.layout for kernel in found.kernels for write in kernel.writes]


_X, _W = torch.randn(1, 20, 9, 9), torch.randn(20, 20, 3, 3)


def test_between_convolutions_channels_are_blocked() -> None:
    """Channels are blocked inside; outputs lie as the graph says."""
    inner, out = written(lambda x, w: convolution(convolution(x, w).relu(), w), _X, _W)
    assert inner == Blocked(16)
    assert out == Strided((20 * 81, 81, 9, 1))


def test_few_channels_make_small_blocks() -> None:
    """The next power of two."""
    inner, _ = written(lambda x, w: convolution(convolution(x, w), w), torch.randn(1, 3, 9, 9), torch.randn(3, 3, 3, 3))
    assert inner == Blocked(4)


def test_pooling_keeps_the_blocks() -> None:
    """Everything of the same rank computed from a convolution's result."""

    def pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.avg_pool2d.default(convolution(x, w).relu(), [2, 2], [2, 2])
        return torch.ops.aten.avg_pool2d.default(y, [2, 2], [2, 2])

    assert written(pooled, _X, _W)[:-1] == [Blocked(16), Blocked(16)]


def test_another_rank_is_row_major() -> None:
    """Tokens for a matmul: rows of pixels by channels."""

    def tokens(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = convolution(convolution(x, w), w).flatten(2)[0]
        return torch.mm(torch.mm(v, y), y.t())

    layouts = written(tokens, _X, _W, torch.randn(20, 20))
    assert Blocked(16) in layouts
    assert isinstance(layouts[-2], Strided)


@pytest.mark.parametrize("groups", [1, 20])
def test_depthwise_convolutions_are_blocked_too(groups: int) -> None:
    """In whole vectors, whatever the groups."""
    w = torch.randn(20, 20 // groups, 3, 3)
    inner, _ = written(lambda x, w: convolution(convolution(x, w, groups), w, groups), _X, w)
    assert inner == Blocked(16)


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 2), (torch.uint8, 16)])
def test_what_is_read_in_words_has_blocks_of_them(dtype: torch.dtype, block: int) -> None:
    """A convolution with groups of 2 channels writes blocks of 2, unless another reads words of four bytes of it."""
    target = dataclasses.replace(_AVX512, features=("avx512f", "avx512_vnni"))

    def two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return convolution(convolution(x, w, 10).relu().to(dtype).float(), v.float())

    v = torch.randint(-9, 9, (20, 20, 3, 3), dtype=torch.int8) if dtype is torch.uint8 else _W
    inner, _ = written(two, _X, torch.randn(20, 2, 3, 3), v, target=target)
    assert inner == Blocked(block)
