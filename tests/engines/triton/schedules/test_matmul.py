"""Matrix products: sizes that fill no tile, batches, operands that are computed, what is fused behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from tests.engines.triton.regions_for_tests import HOPPER, check, kernels_of
from torch_hybrid_backend.engines.triton.alternatives import alternatives
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.interpreted import interpretable
from torch_hybrid_backend.engines.triton.schedules.matmul import operand_dtype
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, MatMulKernel, Store, kernel_sizes
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import Dim, evaluate, symbol

pytest.importorskip("triton")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 33), (64, 64, 64), (130, 65, 100), (17, 200, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes(m: int, n: int, k: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, torch.mm, torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), kinds=(MatMulKernel,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_tensor_cores_do_not_multiply(dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, torch.mm, (3 * torch.randn(20, 30)).to(dtype), (3 * torch.randn(30, 9)).to(dtype))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_thin_products(dtype: torch.dtype, is_transposed: bool, tmp_path: Path) -> None:
    """Few rows, or columns, by a matrix that lies along k or across it; sums are in float32, without tensor cores."""
    for m, n, k in ((1, 70, 300), (7, 33, 65), (90, 2, 100)):
        a, b = (3 * torch.randn(m, k)).to(dtype), (3 * torch.randn(k, n)).to(dtype)
        b = b.t().contiguous().t() if is_transposed else b
        check(tmp_path, torch.mm, a, b, kinds=(MatMulKernel,), tolerance=1e-4)
        if not (is_transposed or m == 1 or n <= 2):
            continue  # a few rows are better off with tensor cores where neighbours of the matrix are no neighbours along k
        (kernel,) = kernels_of(torch.mm, a, b)
        assert "tl.dot" not in emit_kernel(kernel, "kernel", HOPPER).text


def test_what_is_computed_is_0_beyond_k(tmp_path: Path) -> None:
    """The logarithm of an element that does not exist would be -inf. In thin products, and in tiles."""
    for m in (3, 40):
        check(tmp_path, lambda a, b: a.log() @ b, torch.rand(m, 37) + 0.5, torch.randn(37, 30))
        check(tmp_path, lambda a, b: pad(a, (2, 3)) @ b, torch.randn(m, 37).half(), torch.randn(42, 30).half())


def test_sizes_known_at_run_time() -> None:
    """A program serves all sizes, size 0 too, of which nothing is the sum of k; parts along k where the result's size is known."""
    m, k = symbol("s0", 30), symbol("s1", 5000)
    kernel = _product(m, 20, k)
    target = Target(90, 132, is_interpreted=True)
    (preferred,) = [v for v in alternatives(_product(30, 20, k), target) if v.is_preferred]
    assert len(preferred.kernels) == 2
    for rows, depth in ((1, 1), (40, 100), (0, 3), (3, 0)):
        a, b = torch.randn(rows, depth), torch.randn(depth, 20)
        out = torch.full((rows, 20), 77.0)
        program = emit_kernel(kernel, "kernel", target)
        grid = tuple(evaluate(n, {"s0": rows, "s1": depth}) for n in program.launch.grid)
        if 0 not in grid:
            sizes = {"s0": rows, "s1": depth}
            numbers = [sizes[size.name] for size in kernel_sizes(kernel)]
            interpretable(program.text, program.name)[grid](a, b, out, *numbers, **program.launch.constants)
        torch.testing.assert_close(out, a @ b)


def _product(m: Dim, n: Dim, k: Dim) -> MatMulKernel:
    """(m, k) by (k, n), of float32."""
    a, b, out = (Argument(Buffer(shape, "float32"), contiguous(shape)) for shape in ((m, k), (k, n), (m, n)))
    domain = (LoopVar("b", 1), LoopVar("m", m), LoopVar("n", n))
    along = LoopVar("k", k)
    _, i, j = map(index_of, domain)
    accumulator = Buffer((1, m, n), "float32", "accumulator")
    stores = (Store(out.buffer, (i, j), accumulator.at((as_index(0), i, j))),)
    operands = a.buffer.at((i, index_of(along))), b.buffer.at((index_of(along), j))
    return MatMulKernel((a, b), (out,), domain, along, *operands, accumulator, stores)


def test_batches_and_transposed_operands(tmp_path: Path) -> None:
    """Batches and transposed operands are multiplied, also one weight for all of a batch."""
    check(tmp_path, lambda a, b: a @ b.transpose(1, 2), torch.randn(3, 20, 40), torch.randn(3, 50, 40))
    check(tmp_path, lambda a, b: a @ b, torch.randn(3, 20, 40), torch.randn(40, 50))


def test_the_left_operand_is_read_where_it_lies(tmp_path: Path) -> None:
    """In any order of memory, as the gradient of a weight wants it: no copy is made. What an index is divided for is copied."""
    a, b, heads = torch.randn(20, 40), torch.randn(20, 50), torch.randn(2, 20, 3, 8)
    check(tmp_path, lambda a, b: a.t() @ b, a, b, kinds=(MatMulKernel,))
    check(tmp_path, lambda h: h.transpose(1, 2) @ h.permute(0, 2, 3, 1), heads, kinds=(MatMulKernel,))
    flat = lambda h, w: h.transpose(1, 2).reshape(6, 160) @ w  # noqa: E731
    check(tmp_path, flat, heads, torch.randn(160, 30), kinds=(MapKernel, MatMulKernel))


def test_an_epilogue(tmp_path: Path) -> None:
    """Bias, activation and a sum are in the same kernel."""
    x, w, bias, other = torch.randn(30, 40), torch.randn(50, 40), torch.randn(50), torch.randn(30, 50)
    linear = torch.nn.functional.linear
    check(tmp_path, lambda x, w, b, o: linear(x, w, b).relu() + o, x, w, bias, other, kinds=(MatMulKernel,))


def test_many_tiles_of_rows(tmp_path: Path) -> None:
    """More than a group of them, and a group that is not full."""
    check(tmp_path, torch.mm, torch.randn(64 * 11 - 3, 16), torch.randn(16, 130))


def test_operands_stay_half_where_nothing_rounds() -> None:
    """Operands that are loaded, selected or padded stay half; not what is computed. The interpreter multiplies no bfloat16."""
    half, single = Buffer((4,), "bfloat16"), Buffer((4,), "float32")
    load = half.at((as_index(0),))
    gpu = Target(90, 132)
    assert operand_dtype(gpu, load, load) == "bfloat16"
    assert (
        operand_dtype(gpu, load, ops.guard(ops.call("lt", load, load), load, ops.const(0.0, "float32"))) == "bfloat16"
    )
    assert operand_dtype(gpu, load, ops.add(load, load)) == "float32"
    assert operand_dtype(gpu, load, single.at((as_index(0),))) == "float32"
    assert operand_dtype(HOPPER, load, load) == "float32"
