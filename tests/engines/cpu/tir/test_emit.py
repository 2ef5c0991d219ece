"""From kernels to TIR functions, and the kernels that no schedule serves."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cpu.kernels_for_tests import every_kind, matmul_kernel, scale_kernel
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.index import LoopVar, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Kernel, MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import symbol

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


@pytest.mark.parametrize("kind", every_kind())
def test_every_kind_of_kernel_has_a_schedule(kind: str) -> None:
    """Its function has the name and an array for each argument, those it reads first."""
    kernel = every_kind()[kind]
    function = emit_kernel(kernel, "name_of_it", _AVX512)
    assert str(function.attrs["global_symbol"]) == "name_of_it"
    arguments = (*kernel.reads, *kernel.writes)
    assert [int(array.shape[0]) for array in function.params] == [argument.span for argument in arguments]


def test_sizes_come_after_the_arrays() -> None:
    """Arguments behind the arrays are one int32 for each size that is known at run time only."""
    n, m = symbol("n"), symbol("m")
    x, out = (Argument(Buffer((n, m), "bool"), contiguous((n, m))) for _ in range(2))
    place = (var("i", n), var("j", m))
    store = Store(out.buffer, place, x.buffer.at(place))
    kernel = MapKernel((x,), (out,), (LoopVar("i", n), LoopVar("j", m)), (store,))
    function = emit_kernel(kernel, "k", _AVX512)
    assert [str(size.ty) for size in function.params[2:]] == ["int32", "int32"]
    assert [str(array.dtype) for array in function.params[:2]] == ["uint8", "uint8"]


def test_a_kernel_that_nothing_serves() -> None:
    """The error names its class."""
    x = Argument(Buffer((4,), "float32"), contiguous((4,)))
    with pytest.raises(ScheduleError, match="no schedule serves a Kernel"):
        emit_kernel(Kernel((x,), (x,), (LoopVar("i", 4),)), "k", _AVX512)


def test_ranks_that_a_schedule_does_not_have() -> None:
    """Neither one that ranks nothing, nor one that has fewer ways."""
    with pytest.raises(ScheduleError, match="this MapKernel has one way only"):
        emit_kernel(dataclasses.replace(scale_kernel(), schedule_rank=1), "k", _AVX512)
    emit_kernel(dataclasses.replace(matmul_kernel(), schedule_rank=1), "k", _AVX512)
    with pytest.raises(ScheduleError, match="rank 1000"):
        emit_kernel(dataclasses.replace(matmul_kernel(), schedule_rank=1000), "k", _AVX512)
