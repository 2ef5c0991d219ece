"""The other ways of computing a kernel, by name and estimate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from tests.engines.cpu.kernels_for_tests import every_kind
from tests.engines.cpu.schedule_runner import HOST, run_kernel
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands.packing import pack_winograd_weight
from torch_hybrid_backend.engines.cpu.schedules import schedule_of
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.engines.cpu.weights import Winograd
from torch_hybrid_backend.loops.kernels import Kernel, MapKernel
from torch_hybrid_backend.loops.layout import Blocked

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)
_CHOICES = [f"choice {n}" for n in range(1, 8)]


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's ways have tests of their own."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def of_convolution(
    x: torch.Tensor, w: torch.Tensor, stride: int = 1, dilation: int = 1, is_constant: bool = True
) -> tuple[Kernel, list[Variant]]:
    """The convolution's kernel and its alternatives."""

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, None, [stride] * 2, [1, 1], [dilation] * 2, False, [0, 0], 1)

    found = assemble(region_of(convolution, x, w, changing=1 if is_constant else 2), TvmBackend(_AVX512))
    kernel = found.kernels[-1]
    return kernel, alternatives(kernel, {packed.buffer: packed for packed in found.packed}, _AVX512)


def test_winograd_where_it_gains() -> None:
    """The best first and preferred; each has its own transformed weight in place of the packed one, and rounds otherwise."""
    w = torch.randn(64, 64, 3, 3)
    kernel, found = of_convolution(torch.randn(1, 64, 56, 56), w)
    assert isinstance(kernel, CpuConvKernel)
    assert [variant.name for variant in found] == ["winograd 4", "winograd 2", *_CHOICES]
    assert [variant.is_preferred for variant in found] == [True] + [False] * 8
    assert [variant.is_exact for variant in found] == [False, False] + [True] * 7
    assert found[0].cost < found[1].cost < 1
    for variant, m in zip(found[:2], (4, 2), strict=True):
        (other,), (packed,) = variant.kernels, variant.packed
        assert isinstance(other, CpuConvKernel)
        assert isinstance(other.weight, Winograd)
        assert (other.weight.outputs, other.weight.buffer) == (m, packed.buffer)
        assert kernel.weight.buffer not in [read.buffer for read in other.reads]
        assert packed.buffer in [read.buffer for read in other.reads]
        assert len(other.reads) == len(kernel.reads)
        assert torch.equal(packed.pack(w), pack_winograd_weight(w, m, 16))
        assert packed.buffer.shape == packed.pack(w).shape


def test_winograd_of_weights_that_change() -> None:
    """A kernel of its own transforms the weight in each call, as training needs it."""
    kernel, found = of_convolution(torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3), is_constant=False)
    assert isinstance(kernel, CpuConvKernel)
    assert [variant.name for variant in found] == ["winograd 4", "winograd 2", *_CHOICES]
    assert found[0].is_preferred
    for variant in found[:2]:
        transform, convolution = variant.kernels
        assert (variant.packed, variant.is_exact) == ((), False)
        assert isinstance(convolution, CpuConvKernel)
        assert [read.buffer for read in transform.reads] == [kernel.weight.buffer]
        assert [write.buffer for write in transform.writes] == [convolution.weight.buffer]
        assert not convolution.weight.buffer.constant


@pytest.mark.parametrize(("side", "is_blocked"), [(64, True), (56, False)])
@pytest.mark.parametrize("is_constant", [False, True])
def test_winograd_with_channels_in_one_cache_set(side: int, is_blocked: bool, is_constant: bool) -> None:
    """Its row-major results are written in blocks, and a kernel copies them to where they belong."""
    x, w = torch.randn(1, 64, side, side), torch.randn(64, 64, 3, 3)
    kernel, found = of_convolution(x, w, is_constant=is_constant)
    for variant in found[:2]:
        *_, convolution, copy = (*variant.kernels, None)[: len(variant.kernels) + (not is_blocked)]
        assert isinstance(convolution, CpuConvKernel)
        (written,) = convolution.writes
        assert isinstance(written.layout, Blocked) == is_blocked
        if is_blocked:
            assert isinstance(copy, MapKernel)
            assert copy.reads == (written,)
            assert copy.writes == kernel.writes


@pytest.mark.parametrize("m", [2, 4])
def test_winograd_through_blocks_computes_the_convolution(m: int) -> None:
    """Two kernels, one after the other, against float64."""
    x, w = torch.randn(2, 32, 32, 32), torch.randn(64, 32, 3, 3)
    found = of_convolution(x, w)[1]
    (variant,) = [each for each in found if each.name == f"winograd {m}"]
    convolution, copy = variant.kernels
    (packed,) = variant.packed
    given = {a.buffer: packed.pack(w) if a.buffer is packed.buffer else x for a in convolution.reads}
    for kernel in (convolution, copy):
        schedule = schedule_of(kernel)
        assert schedule is not None
        results = run_kernel(kernel, schedule, given, dataclasses.replace(HOST, cores=2))
        given = {a.buffer: result for a, result in zip(kernel.writes, results, strict=True)}
    expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("x", "w", "more"),
    [
        ((1, 64, 56, 56), (64, 64, 3, 3), {"stride": 2}),
        ((1, 64, 56, 56), (64, 64, 3, 3), {"dilation": 2}),
        ((1, 64, 56, 56), (64, 64, 1, 1), {}),
        ((1, 3, 56, 56), (64, 3, 3, 3), {}),  # channels that do not fill a vector
        (
            (1, 512, 4, 4),
            (512, 512, 3, 3),
            {"is_constant": False},
        ),  # the transform of the weight takes longer than the convolution
    ],
)
def test_where_winograd_does_not_serve(x: tuple[int, ...], w: tuple[int, ...], more: dict[str, int]) -> None:
    """Only the schedule's own choices are left."""
    _, found = of_convolution(torch.randn(x), torch.randn(w), **more)  # type: ignore[arg-type]
    assert [variant.name for variant in found] == _CHOICES


def test_float64_is_summed_directly() -> None:
    """Winograd's transforms are float32's."""
    _, found = of_convolution(torch.randn(1, 64, 56, 56).double(), torch.randn(64, 64, 3, 3).double())
    assert [variant.name for variant in found] == _CHOICES


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_whole_numbers_in_floats_are_summed_directly(dtype: torch.dtype) -> None:
    """Without dot products few channels are summed in float32, exactly; Winograd's transforms would round."""
    x, w = torch.ones(1, 16, 56, 56, dtype=torch.uint8), torch.ones(64, 16, 3, 3, dtype=dtype)
    target = dataclasses.replace(_AVX512, features=(), lanes=4)

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x.float(), w.float(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    found = assemble(region_of(convolution, x, w), TvmBackend(target))
    constants = {packed.buffer: packed for packed in found.packed}
    (kernel,) = (kernel for kernel in found.kernels if isinstance(kernel, CpuConvKernel))
    assert kernel.accumulator.dtype == "float32"
    names = [variant.name for variant in alternatives(kernel, constants, target)]
    assert (names == _CHOICES) == (dtype is torch.int8)


def test_choices_of_a_schedule_are_its_ranks() -> None:
    """The kernel itself has rank 0."""
    kernel = every_kind()["matmul"]
    found = alternatives(kernel, {}, _AVX512)
    assert [variant.name for variant in found] == _CHOICES
    ranks = [one.schedule_rank for variant in found for one in variant.kernels]
    assert (kernel.schedule_rank, ranks) == (0, list(range(1, 8)))


@pytest.mark.parametrize("kind", ["map", "row", "attention"])
def test_kernels_without_a_choice(kind: str) -> None:
    """Their schedules rank nothing."""
    assert alternatives(every_kind()[kind], {}, _AVX512) == []
