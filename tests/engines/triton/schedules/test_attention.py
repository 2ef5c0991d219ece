"""Attention programs beside PyTorch's composite, run by the interpreter with a GPU's tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.triton.machine_code_for_tests import kernels_for, machine_code
from tests.engines.triton.programs_for_tests import HOPPER, TARGETS
from tests.engines.triton.regions_for_tests import check, compiled
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.engines.triton.alternatives import alternatives
from torch_hybrid_backend.engines.triton.kernels import FlashKernel
from torch_hybrid_backend.engines.triton.schedules.attention import launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, MapKernel, RowKernel

pytest.importorskip("triton")

attend = torch.nn.functional.scaled_dot_product_attention
FEW = dataclasses.replace(HOPPER, multiprocessors=1)
MANY = dataclasses.replace(HOPPER, multiprocessors=132)  # more than there are programs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(5, 5, 8), (70, 70, 20), (1, 90, 16), (64, 130, 32), (1, 1, 48)]
)
def test_sizes(target: str, causal: bool, queries: int, keys: int, width: int, tmp_path: Path) -> None:
    """Rows and keys that fill no tile; a causal mask begins at the first key."""
    q, k, v = (torch.randn(2, 3, n, width) for n in (queries, keys, keys))
    function = lambda q, k, v: attend(q, k, v, is_causal=causal)  # noqa: E731
    check(tmp_path, function, q, k, v, target=TARGETS[target], kinds=(FlashKernel,))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("width", "values"), [(16, 40), (72, 72), (128, 64), (200, 256)])
def test_widths_and_dtypes(dtype: torch.dtype, width: int, values: int, tmp_path: Path) -> None:
    """Heads whose width is no power of two, and values of another width."""
    q, k, v = (torch.randn(1, 2, n, e).to(dtype) for n, e in ((50, width), (70, width), (70, values)))
    # Where widths differ PyTorch's composite multiplies in float32: values are converted first.
    kinds = (MapKernel, FlashKernel) if width != values and dtype is not torch.float64 else (FlashKernel,)
    check(tmp_path, attend, q, k, v, kinds=kinds)


def test_masks(tmp_path: Path) -> None:
    """Added to the scores; one for all heads, or one for each; a row that sees nothing is 0."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (40, 50, 50))
    for shape in ((2, 3, 40, 50), (1, 1, 40, 50)):
        mask = torch.randn(shape)
        mask[..., 3, :] = -math.inf
        check(tmp_path, lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, mask)


def _seen(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """The keys at or before a query's position, and within a window that ends there."""
    keys = torch.arange(k.shape[2])
    return (keys <= positions[:, None]) & (keys > positions[:, None] - window)


def _unread(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The tensor with NaN in rows that nothing may read."""
    x = x.clone()
    x[:, :, :first] = math.nan
    x[:, :, last:] = math.nan
    return x


def _chosen(region: KernelRegion) -> list[Kernel]:
    """The kernels that a region runs, which its variants decide."""
    return [kernel for option in region.options for kernel in option.chosen.variant.kernels]


@pytest.mark.parametrize(("length", "window"), [(70, 1000), (1, 1000), (300, 20), (512, 100)])
@pytest.mark.parametrize("target", [FEW, MANY], ids=["one program", "split"])
def test_a_cache_is_read_to_its_length(length: int, window: int, target: Target, tmp_path: Path) -> None:
    """A static cache: its mask is computed from positions that are only known in the call. Blocks that no query sees are not read, before a
    window either: NaN there changes nothing. Heads share keys, and three queries have positions of their own."""
    q, k, v = torch.randn(1, 4, 3, 32), torch.randn(1, 2, 512, 32), torch.randn(1, 2, 512, 32)
    positions = torch.tensor([max(0, length - 3), max(0, length - 2), length - 1])

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, attn_mask=_seen(q, k, positions, window), enable_gqa=True)

    tile = 32
    first = max(0, int(positions[0]) - window + 1) // tile * tile
    last = -(-length // tile) * tile
    given = _unread(k, first, last), _unread(v, first, last)
    region, taken = compiled(tmp_path, decode, q, *given, positions, target=target)
    beginnings, flash, *combining = _chosen(region)  # the first one: where three windows begin
    assert isinstance(beginnings, MapKernel)
    assert [type(kernel) for kernel in combining] == [RowKernel] * (target is MANY)
    assert isinstance(flash, FlashKernel)
    assert flash.share == 2
    assert launch(flash, target).constants["KEYS"] == tile
    exact = decode(q.double(), k.double(), v.double(), positions)
    torch.testing.assert_close(region(taken)[0].double(), exact, rtol=2e-5, atol=2e-5)


def test_a_paged_cache_is_read_by_its_table(tmp_path: Path) -> None:
    """Pages are read where the table says, without a copy, and those beyond the length not at all."""
    q, keys, values = torch.randn(1, 4, 1, 32), torch.randn(40, 16, 4, 32), torch.randn(40, 16, 4, 32)
    table, position = torch.randperm(40)[:20], torch.tensor([100])

    def decode(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        k, v = (pages[table].flatten(0, 1).transpose(0, 1)[None] for pages in (keys, values))
        return attend(q, k, v, attn_mask=torch.arange(320) <= position[:, None])

    exact = decode(q.double(), keys.double(), values.double(), table, position)
    unread = table[8:]  # blocks of 32 keys up to the length are read
    keys[unread], values[unread] = math.nan, math.nan
    region, taken = compiled(tmp_path, decode, q, keys, values, table, position)
    assert [type(kernel) for kernel in region.kernels.kernels] == [FlashKernel]
    torch.testing.assert_close(region(taken)[0].double(), exact, rtol=2e-5, atol=2e-5)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None].expand(1, 2, 3, 70, 16).reshape(1, 6, 70, 16)


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(3, 1)


@pytest.mark.parametrize("repeat", [_expanded, _interleaved])
def test_repeated_heads_cost_no_memory(repeat: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Keys repeated by `expand` and `reshape`, or by `repeat_interleave`: the kernel reads them where they are."""
    q, k, v = torch.randn(1, 6, 70, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, repeat(k), repeat(v), is_causal=True)

    check(tmp_path, function, q, k, v)
    region, _ = compiled(tmp_path, function, q, k, v)
    (kernel,) = region.kernels.kernels
    assert isinstance(kernel, FlashKernel)
    assert kernel.share == 3
    assert sorted(argument.buffer.shape for argument in kernel.reads) == [(1, 2, 70, 16)] * 2 + [(1, 6, 70, 16)]


def test_scores_that_a_model_writes_out(tmp_path: Path) -> None:
    """A cap and position biases, in attention that is written out: one kernel. A row that sees nothing is NaN there, as softmax has it."""
    q, k, v = (torch.randn(2, 2, n, 16) for n in (40, 70, 70))

    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh((q * 0.25) @ k.transpose(-1, -2) / 3) * 3
        queries, keys = torch.arange(40)[:, None], torch.arange(70)
        scores = scores - (queries - keys).abs() * 0.1
        return torch.softmax(scores.masked_fill(keys >= queries, -math.inf), -1) @ v

    check(tmp_path, written, q, k, v, kinds=(FlashKernel,))


def test_a_split_ends_in_what_follows(tmp_path: Path) -> None:
    """Programs share the keys of a row; the kernel that combines them has the epilogue, and a row that sees nothing is 0."""
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1100, 16), torch.randn(1, 2, 1100, 16)
    mask = torch.zeros(2, 1100)
    mask[1] = -math.inf

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        return torch.relu(attend(q, k, v, attn_mask=mask)) + x

    inputs = (q, k, v, mask, torch.randn(1, 2, 2, 16))
    check(tmp_path, function, *inputs, target=MANY, kinds=(FlashKernel,))
    region, _ = compiled(tmp_path, function, *inputs, target=MANY)
    assert [type(kernel) for kernel in _chosen(region)] == [FlashKernel, RowKernel]


@pytest.mark.parametrize("target", [FEW, MANY], ids=["one program", "split"])
def test_log_sum_exps(target: Target, tmp_path: Path) -> None:
    """Log-sum-exps are read in training beside the result, by one program or by several that share the keys. A row that sees nothing has what
    PyTorch gives it."""
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 1100, 16)
    mask = torch.zeros(1, 2, 3, 1100)
    mask[..., 1, :] = -math.inf

    def function(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=mask)
        return result + 1, sums

    region, taken = compiled(tmp_path, function, q, k, mask, target=target)
    assert [type(kernel) for kernel in _chosen(region)] == [FlashKernel, *([RowKernel] * 2 * (target is MANY))]
    sums, result = sorted(region(taken), key=torch.Tensor.dim)
    exact, exact_sums = function(q.double(), k.double(), mask.double())
    torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(sums.double(), exact_sums, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "parts"),
    [(2, 1, 300, 1), (2, 1, 4096, 16), (64, 1, 4096, 2), (132, 1, 4096, 1), (2, 4096, 4096, 2), (1, 1, 1 << 20, 64)],
)
def test_keys_are_split_where_programs_are_few(heads: int, queries: int, keys: int, parts: int, tmp_path: Path) -> None:
    """Up to one program for each multiprocessor, each with 256 keys at least."""
    q, k = torch.empty(1, heads, queries, 64, dtype=torch.half), torch.empty(1, heads, keys, 64, dtype=torch.half)
    region, _ = compiled(tmp_path, lambda q, k: attend(q, k, k), q, k, target=Target(0, 132, is_interpreted=True))
    (kernel,) = region.kernels.kernels
    assert isinstance(kernel, FlashKernel)
    found = alternatives(kernel, Target(90, 132))
    assert [v.name for v in found if v.is_preferred] == [f"keys in {parts} parts"] * (parts > 1)
    for variant in found:
        first, _ = variant.kernels
        assert isinstance(first, FlashKernel)
        assert first.splits == parts


def _causal(q: torch.Tensor) -> torch.Tensor:
    return attend(q, q, q, is_causal=True)


@pytest.mark.parametrize(
    ("capability", "width"),
    [(90, 64), *(pytest.param(c, w, marks=pytest.mark.full) for c, w in ((80, 64), (80, 128), (90, 128)))],
)
def test_machine_code(capability: int, width: int, tmp_path: Path) -> None:
    """Machine code of bfloat16 has products by tensor cores (by groups of four warps on Hopper), exponentials in base 2, nothing spilled, and
    no more shared memory than there is."""
    target = Target(capability, 132)
    (kernel,) = kernels_for(_causal, torch.empty(1, 16, 2048, width, dtype=torch.bfloat16), target=target)
    code = machine_code(kernel, target, tmp_path)
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in code.ptx
    assert "ex2.approx" in code.ptx
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= (227 << 10 if capability == 90 else 163 << 10)


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_of_decoding(capability: int, tmp_path: Path) -> None:
    """A query of eight heads that share keys: they are the rows of a tile that tensor cores multiply."""
    target = Target(capability, 132)
    q, k = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16), torch.empty(1, 4, 8192, 128, dtype=torch.bfloat16)

    def decode(q: torch.Tensor, k: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return attend(q, k, k, attn_mask=torch.arange(8192) <= position[:, None], enable_gqa=True)

    (whole,) = kernels_for(decode, q, k, torch.tensor([7]), target=target)
    assert isinstance(whole, FlashKernel)
    (split,) = alternatives(whole, target)
    flash, combining = split.kernels
    assert isinstance(flash, FlashKernel)
    assert flash.splits > 8
    code = machine_code(flash, target, tmp_path)
    assert "mma.sync" in code.ptx
    assert code.spilled_bytes == 0
    assert machine_code(combining, target, tmp_path).spilled_bytes == 0
