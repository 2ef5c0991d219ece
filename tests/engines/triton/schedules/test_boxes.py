"""Copies of operands by TMA: what can be copied, and that the results are those of loads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

from tests.engines.triton.programs_for_tests import HOPPER, run_program
from tests.engines.triton.regions_for_tests import kernels_of
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.schedules.boxes import copies_both
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.kernels import Kernel, MatMulKernel
from torch_hybrid_backend.loops.ops import call, const, from_index, guard

pytest.importorskip("triton")

_PERSISTENT = Tiling(16, 32, 16, persistent=3)
_half = torch.float16


def _kernel(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> MatMulKernel:
    *_, kernel = kernels_of(function, *inputs)
    assert isinstance(kernel, MatMulKernel)
    return kernel


def _persistent(kernel: MatMulKernel) -> Kernel:
    (made,) = tiled(kernel, _PERSISTENT)
    return made


def _descriptors(kernel: MatMulKernel) -> list[str]:
    return re.findall(r"= tl\.make_tensor_descriptor\((.*)\)", emit_kernel(_persistent(kernel), "kernel", HOPPER).text)


def _matrix(*shape: int, dtype: torch.dtype = _half) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_what_can_be_copied() -> None:
    """Operands in either order of memory, from where they begin in a tensor, batches, and one matrix for all of a batch."""
    left = "in0, [40, 72], [72, 1], [ROWS, DEPTH]"
    right = "in1, [72, 24], [24, 1], [DEPTH, COLUMNS]"
    assert _descriptors(_kernel(torch.mm, _matrix(40, 72), _matrix(72, 24))) == [left, right]
    turned = _kernel(lambda a, b: a.t() @ b.t(), _matrix(72, 40), _matrix(24, 72))
    assert _descriptors(turned) == ["in0, [72, 40], [40, 1], [DEPTH, ROWS]", "in1, [24, 72], [72, 1], [COLUMNS, DEPTH]"]
    text = emit_kernel(_persistent(turned), "kernel", HOPPER).text
    assert "load([step * DEPTH, row]).T" in text
    assert "load([column, step * DEPTH]).T" in text
    part = _kernel(lambda a, b: a[8:, 16:] @ b, _matrix(48, 88), _matrix(72, 24))
    assert _descriptors(part)[0] == "in0 + 720, [40, 72], [88, 1], [ROWS, DEPTH]"
    batch = _kernel(lambda a, b: a @ b.expand(3, 72, 24), _matrix(3, 40, 72), _matrix(1, 72, 24))
    assert _descriptors(batch) == ["in0, [3, 40, 72], [2880, 72, 1], [1, ROWS, DEPTH]", right]
    for kernel in (turned, part, batch):
        assert copies_both(kernel)


@pytest.mark.parametrize(
    ("function", "a"),
    [
        (torch.mm, _matrix(40, 70)),  # rows begin at 4 bytes
        (lambda a, b: a[:, 4:] @ b, _matrix(40, 72)),
        (lambda a, b: a.unfold(0, 72, 8) @ b, _matrix(400)),  # rows overlap
        (lambda a, b: a[:, ::2] @ b, _matrix(40, 144)),
        (lambda a, b: a.expand(40, 72) @ b, _matrix(1, 72)),
        (lambda a, b: a.transpose(0, 1) @ b.expand(4, 72, 24), _matrix(40, 4, 72)),  # batches within rows
        (lambda a, b: a.t() @ b.float(), _matrix(72, 40, dtype=torch.float32)),  # only halves are turned round
        (torch.mm, _matrix(40, 72, dtype=torch.float64)),
    ],
)
def test_what_cannot_be_copied(function: Callable[..., torch.Tensor], a: torch.Tensor) -> None:
    """The plain program reads it, and persistent ones are not proposed; forced to be one, it copies the other operand alone."""
    rows = next((n for n in (70, 68, 72) if n in a.shape), 72) if a.dim() == 2 else 72
    rows = 68 if a.shape == (40, 72) and function is not torch.mm else rows
    kernel = _kernel(function, a, _matrix(rows, 24, dtype=torch.float64 if a.dtype == torch.float64 else _half))
    assert not copies_both(kernel)
    assert all(found.startswith("in1") for found in _descriptors(kernel))


def test_what_exists_under_a_condition_is_not_copied() -> None:
    """Elements that exist under a condition are not copied: where it does not hold, memory may end."""
    kernel = _kernel(torch.mm, _matrix(40, 72), _matrix(72, 24))
    first = call("lt", from_index(index_of(kernel.k), "int64"), const(50, "int64"))
    guarded = dataclasses.replace(kernel, a=guard(first, kernel.a, const(0.0, "float32")))
    assert not copies_both(guarded)
    assert len(_descriptors(guarded)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_operands_that_are_computed_of_what_is_copied(dtype: torch.dtype) -> None:
    """Operands computed of copied ones are 0 behind the end of k, where the logarithm of a copied zero is not; other rows and columns are never
    stored."""
    a, b = ((torch.rand(rows, 72) + 0.5).to(dtype) for rows in (40, 24))
    kernel = _kernel(torch.nn.functional.linear, a, b)
    both = _persistent(dataclasses.replace(kernel, a=call("log", kernel.a), b=call("log", kernel.b)))
    text = emit_kernel(both, "kernel", HOPPER).text
    assert text.count("tl.make_tensor_descriptor") == 2
    (got,) = run_program(both, dict(zip((read.buffer for read in kernel.reads), (a, b), strict=True)))
    exact = a.double().log() @ b.double().log().t()
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=2e-2 if dtype == _half else 1e-4)
