"""Products on tiles in place of kernels by vectors: where there are any, and that they compute the same."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.codegen.regions_for_tests import region_of
from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.kernels_for_tests import matmul_kernel
from tests.engines.cpu.operands.test_quantized import assembled
from tests.engines.cpu.schedule_runner import HOST, run_kernel
from tests.engines.cpu.schedules.convolution.test_depthwise_vnni import made
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.operands.packing import pack_conv_tiles
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import pack_right
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants import amx
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, InPlace, Panels, Quantized, Weight
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import as_index, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.sizes.size import symbol

__all__ = ["emulated"]  # the fixture

quantized = torch.ops.quantized_decomposed


@pytest.fixture(autouse=True)
def float32_as_it_is() -> Iterator[None]:
    """PyTorch's default for products, whatever tests before this one set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def of_product(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, target: Target = SAPPHIRE_RAPIDS, changing: int = 1
) -> tuple[RegionKernels, Kernel, list[Variant]]:
    """The region of a product, its kernel, and the variants of it that multiply on tiles."""
    found = assemble(region_of(function, *inputs, changing=changing), TvmBackend(target))
    kernel = found.kernels[-1]
    ways = alternatives(kernel, {packed.buffer: packed for packed in found.packed}, target)
    return found, kernel, [way for way in ways if way.name.startswith("amx ")]


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(torch.clamp(x, min=-1.5), w.t()))


@pytest.mark.parametrize(("rows", "columns", "form"), [(48, 96, Panels), (128, 1536, InPlace)])
def test_a_linear_layer(emulated: ctypes.CDLL, rows: int, columns: int, form: type[Weight]) -> None:
    """float32 by three parts, preferred and inexact, of a weight packed ahead, one that is packed anyway or one that lies as it is."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, 128), torch.randn(columns, 128)
    _, kernel, ways = of_product(linear, x, w)
    assert isinstance(kernel, CpuMatMulKernel)
    assert isinstance(kernel.weight, form)
    assert [way.name for way in ways] == ["amx float32", *[f"amx float32 choice {n}" for n in (1, 2, 3)]]
    assert [way.is_preferred for way in ways] == [True, False, False, False]
    assert not any(way.is_exact for way in ways)
    first = ways[0]
    (product,), (packed,) = first.kernels, first.packed
    assert isinstance(product, CpuMatMulKernel)
    assert isinstance(product.weight, AmxTiles)
    assert 0.3 < first.cost < 0.8
    assert len(product.reads) == len(kernel.reads)
    assert product.weight.buffer is packed.buffer
    packed_weight = packed.pack(w)
    assert tuple(packed_weight.shape) == packed.buffer.shape
    # The other kernel of the region makes A.
    a = x.clamp(min=-1.5)
    inputs = {read.buffer: packed_weight if read.buffer is packed.buffer else a for read in product.reads}
    target = dataclasses.replace(SAPPHIRE_RAPIDS, mcpu=HOST.mcpu, cpu=HOST.cpu, features=HOST.features)
    (got,) = run_kernel(product, emit, inputs, target)
    want = linear(x.double(), w.double())
    scale = x.double().clamp(min=-1.5).abs() @ w.double().t().abs()
    assert ((got.reshape(want.shape) - want).abs() <= 3e-7 * scale).all()


def test_what_pytorch_allows_of_float32() -> None:
    """Two parts where products of float32 may be rounded; the name, by which times are kept, says so."""
    inputs = torch.randn(64, 100), torch.randn(96, 100)
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        _, _, ways = of_product(linear, *inputs)
        assert ways[0].name == "amx float32 high"
    torch.set_float32_matmul_precision("highest")
    assert of_product(linear, *inputs)[2][0].name == "amx float32"


def test_a_kernel_by_vectors_is_timed_beside_float32_on_tiles() -> None:
    """Estimates are that near, whatever the layer: the first call decides by time. Of the schedule's further ways none comes first."""
    _, _, ways = of_product(linear, torch.randn(1024, 768), torch.randn(3072, 768))
    first, *others = ways
    assert 1 / 1.6 < first.cost < 1
    assert all(other.cost > 1.6 * first.cost for other in others)


def test_bfloat16() -> None:
    """Multiplied as it is: exact, as kernels count that."""
    _, _, ways = of_product(linear, torch.randn(40, 100).bfloat16(), torch.randn(96, 100).bfloat16())
    assert ways[0].name == "amx bfloat16"
    assert (ways[0].is_exact, ways[0].is_preferred) == (True, True)
    assert ways[0].cost < 0.3


def test_float16() -> None:
    """Multiplied as it is where the processor does that, elsewhere as two bfloat16, timed beside the kernel by vectors."""
    inputs = torch.randn(64, 100).half(), torch.randn(96, 100).half()
    (split, *_) = of_product(linear, *inputs)[2]
    assert (split.name, split.is_exact, split.is_preferred) == ("amx float16 split", False, True)
    assert split.cost >= 0.65
    has_float16 = dataclasses.replace(SAPPHIRE_RAPIDS, features=("amx_fp16", *SAPPHIRE_RAPIDS.features))
    (whole, *_) = of_product(linear, *inputs, target=has_float16)[2]
    assert (whole.name, whole.is_exact, whole.is_preferred) == ("amx float16", True, True)
    assert whole.cost < 0.3


@pytest.mark.parametrize(("dtype", "name"), [("uint8", "amx uint8"), ("int8", "amx int8"), ("int16", None)])
def test_integers(dtype: str, name: str | None) -> None:
    """8-bit operands that are widened to int32 sums are multiplied as they are."""
    kernel = matmul_kernel()
    a, packed = Buffer((1, 64, 64), dtype), Buffer((1, 2, 64, 32), "int8", constant=True)
    accumulator = Buffer((1, 64, 64), "int32")
    loaded = ops.cast(a.at((as_index(0), var("m", 64), var("k", 64))), "int32")
    domain = tuple(dataclasses.replace(v, extent=n) for v, n in zip(kernel.domain, (1, 64, 64), strict=True))
    kernel = dataclasses.replace(
        kernel,
        domain=domain,
        k=dataclasses.replace(kernel.k, extent=64),
        a=loaded,
        weight=Panels(buffer=packed, width=32),
        accumulator=accumulator,
    )
    view = of_product(linear, torch.randn(40, 100), torch.randn(96, 100))[0].packed[0]
    weight = Packed(packed, view.source, view.view, view.ahead)
    ways = amx.tile_products(kernel, weight, SAPPHIRE_RAPIDS)
    assert [way.name for way in ways[:1]] == [name][: 0 if name is None else 1]
    assert all(way.is_exact for way in ways)


@pytest.mark.parametrize(("dtype", "zero"), [("int8", 0), ("uint8", 9)])
def test_quantized_operands(emulated: ctypes.CDLL, dtype: str, zero: int) -> None:
    """The offset that moves the left operand for the dot products of vectors is taken off behind a sum on tiles too."""
    torch.manual_seed(0)
    target = dataclasses.replace(SAPPHIRE_RAPIDS, features=(*SAPPHIRE_RAPIDS.features, "avx512_vnni"))
    low = -128 if dtype == "int8" else 0
    x = torch.randint(low, low + 256, (48, 128)).to(getattr(torch, dtype))
    w = torch.randint(-128, 128, (96, 128), dtype=torch.int8)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.float() - zero, w.float().t())

    found, kernel, ways = of_product(function, x, w, target=target)
    assert isinstance(kernel, CpuMatMulKernel)
    assert isinstance(kernel.weight, Panels)
    assert kernel.weight.start is not None
    assert ways[0].name == "amx uint8"
    (product,) = ways[0].kernels
    made = {packed.buffer: packed.pack(w) for packed in (*found.packed, *ways[0].packed)}
    moved = x.int() + 128 if dtype == "int8" else x
    inputs = {}
    for read in product.reads:
        own = made.get(read.buffer)
        inputs[read.buffer] = moved.to(torch.uint8).reshape(read.buffer.shape) if own is None else own  # type: ignore[arg-type]
    on_host = dataclasses.replace(SAPPHIRE_RAPIDS, mcpu=HOST.mcpu, cpu=HOST.cpu, features=HOST.features)
    (got,) = run_kernel(product, emit, inputs, on_host)
    assert torch.equal(got.reshape(48, 96).double(), (x.double() - zero) @ w.double().t())


def of_activations(a: torch.Tensor, b: torch.Tensor) -> tuple[Kernel, list[Variant]]:
    """A product of two tensors that calls bring, integers as what they are dequantized to."""
    target = dataclasses.replace(SAPPHIRE_RAPIDS, features=(*SAPPHIRE_RAPIDS.features, "avx512_vnni", "avx512_bf16"))

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a, b) if a.is_floating_point() else torch.bmm(a.float() * 0.5, b.float())

    found, _, _ = of_product(function, a, b, target=target, changing=2)
    (kernel,) = (kernel for kernel in found.kernels if isinstance(kernel, CpuMatMulKernel))
    constants = {packed.buffer: packed for packed in found.packed}
    return kernel, [way for way in alternatives(kernel, constants, target) if way.name.startswith("amx ")]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_right_operands_of_the_call(emulated: ctypes.CDLL, dtype: str) -> None:
    """Tiles are loaded from the words that every call packs: a matrix for each of a batch, columns that fill no panel, two panels of rows."""
    torch.manual_seed(0)
    if dtype == "uint8":
        a, b = (
            torch.randint(0, 256, (3, 40, 128)).to(torch.uint8),
            torch.randint(-128, 128, (3, 128, 50)).to(torch.int8),
        )
    else:
        a, b = (torch.randint(-8, 9, shape).bfloat16() for shape in ((3, 40, 128), (3, 128, 50)))
    kernel, ways = of_activations(a, b)
    assert (ways[0].name, ways[0].packed, ways[0].is_exact) == (f"amx {dtype}", (), True)
    assert isinstance(kernel, CpuMatMulKernel)
    weight = kernel.weight
    assert isinstance(weight, Panels)
    assert weight.dot is not None
    (product,) = ways[0].kernels
    assert isinstance(product, CpuMatMulKernel)
    assert isinstance(product.weight, AmxTiles)
    assert (product.reads, product.weight.is_vnni) == (kernel.reads, True)
    words = pack_right(b, weight.width, weight.dot)
    inputs = {read.buffer: words if read.buffer is weight.buffer else a for read in product.reads}
    on_host = dataclasses.replace(SAPPHIRE_RAPIDS, mcpu=HOST.mcpu, cpu=HOST.cpu, features=HOST.features)
    (got,) = run_kernel(product, emit, inputs, on_host)
    want = torch.bmm(a.double(), b.double()) * (0.5 if dtype == "uint8" else 1)
    torch.testing.assert_close(got.double(), want, rtol=0 if dtype == "uint8" else 2**-8, atol=0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(1, 40, 96, dtype=torch.uint8), torch.ones(1, 96, 64, dtype=torch.int8)),  # half a step of k
        (torch.ones(1, 40, 128, dtype=torch.uint8), torch.ones(1, 128, 16, dtype=torch.int8)),  # half a panel
        (torch.ones(1, 40, 128, dtype=torch.uint8), torch.ones(1, 128, 64, dtype=torch.uint8)),  # words of two bytes
        (torch.ones(1, 40, 128), torch.ones(1, 128, 64)),
    ],
)
def test_right_operands_of_the_call_that_fill_no_tiles(a: torch.Tensor, b: torch.Tensor) -> None:
    """Operands of the call fill no tiles where the memory behind them would be multiplied, or they lie in no words."""
    assert of_activations(a, b)[1] == []


def of_dequantized(rows: int, k: int, group: int, dtype: torch.dtype) -> tuple[Kernel, list[Variant]]:
    """The kernel of a product with a weight of 4 bits, and its ways on tiles."""

    def by_group(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        how = (scales, None, -8, 7, torch.int8, group, torch.float32)
        return torch.mm(x, quantized.dequantize_per_channel_group(q, *how).to(dtype).t())

    q, scales = torch.randint(-8, 8, (96, k), dtype=torch.int8), torch.rand(96, k // group)
    found = assembled(by_group, torch.randn(rows, k).to(dtype), q, scales, target=SAPPHIRE_RAPIDS)
    (kernel,) = found.kernels
    return kernel, alternatives(kernel, {packed.buffer: packed for packed in found.packed}, SAPPHIRE_RAPIDS)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "amx float32"), (torch.bfloat16, "amx bfloat16"), (torch.float16, "amx float16 split")],
)
def test_dequantized_weights(dtype: torch.dtype, name: str) -> None:
    """The weight is what kernels by vectors read; unpacked it is rounded, or summed in groups, so the kernel counts as inexact."""
    kernel, (first, *_) = of_dequantized(48, 128, 32, dtype)
    (product,) = first.kernels
    assert isinstance(kernel, CpuMatMulKernel)
    assert isinstance(kernel.weight, Quantized)
    assert isinstance(product, CpuMatMulKernel)
    assert (first.name, first.packed, first.is_exact, first.is_preferred) == (name, (), False, True)
    assert (product.reads, product.weight.buffer, product.weight.group) == (kernel.reads, kernel.weight.buffer, 32)


@pytest.mark.parametrize(("row_parts", "name"), [(1, "amx bfloat16"), (2, "amx float32 high")])
def test_rows_that_may_be_rounded(row_parts: int, name: str) -> None:
    """Rows of float32 that may be are one part of bfloat16, or two, in place of three."""
    kernel, _ = of_dequantized(48, 128, 32, torch.float32)
    assert isinstance(kernel, CpuMatMulKernel)
    weight = dataclasses.replace(kernel.weight, row_parts=row_parts)
    (first, *_) = alternatives(dataclasses.replace(kernel, weight=weight), {}, SAPPHIRE_RAPIDS)
    assert first.name == name


def test_dequantized_weights_that_tiles_do_not_serve() -> None:
    """Groups that are no whole steps of k, of float32, which sums them apart; few rows, of which tiles are mostly empty."""
    assert not of_dequantized(4, 128, 32, torch.float32)[1]
    assert not of_dequantized(7, 128, 32, torch.bfloat16)[1]
    assert of_dequantized(8, 128, 32, torch.bfloat16)[1]
    assert not of_dequantized(48, 192, 24, torch.float32)[1]
    assert of_dequantized(48, 192, 24, torch.bfloat16)[1]
    assert of_dequantized(48, 192, 96, torch.float32)[1]


def test_where_tiles_do_not_serve() -> None:
    """No AMX, a weight known only at run time, float64, and few rows."""
    x, w = torch.randn(40, 100), torch.randn(96, 100)
    without = dataclasses.replace(SAPPHIRE_RAPIDS, features=("avx512f",))
    assert not of_product(linear, x, w, target=without)[2]
    only_integers = dataclasses.replace(SAPPHIRE_RAPIDS, features=("amx_int8", "amx_tile", "avx512f"))
    assert not of_product(linear, x, w, target=only_integers)[2]
    assert not of_product(linear, x, w, changing=2)[2]
    assert not of_product(linear, x.double(), w.double())[2]
    assert not of_product(linear, x[:7], w)[2]
    assert of_product(linear, torch.randn(16, 128), torch.randn(96, 128))[2]


@pytest.mark.parametrize(
    ("opened", "hint", "served"),
    [("m", 64, True), ("m", 1, False), ("b", 4, True), ("n", 64, False), ("k", 64, False)],
)
def test_sizes_known_only_at_run_time(opened: str, hint: int, served: bool) -> None:
    """The numbers of rows and matrices may be known only at run time, and their likely number decides; columns and k must be known."""
    _, kernel, _ = of_product(linear, torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16())
    found = of_product(linear, torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16())[0]
    assert isinstance(kernel, CpuMatMulKernel)
    (weight,) = (packed for packed in found.packed if packed.buffer.shape == kernel.weight.buffer.shape)
    variables = dict(zip("bmnk", (*kernel.domain, kernel.k), strict=True))
    variables[opened] = dataclasses.replace(variables[opened], extent=symbol("s", hint))
    kernel = dataclasses.replace(kernel, domain=tuple(variables[v] for v in "bmn"), k=variables["k"])
    assert bool(amx.tile_products(kernel, weight, SAPPHIRE_RAPIDS)) == served


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_few_rows(rows: int) -> None:
    """Tiles are mostly empty: from 2 rows on they are tried beside vectors, from 8 on they may be certain. One row has none."""
    x, w = torch.randn(rows, 512).bfloat16(), torch.randn(256, 512).bfloat16()
    _, _, ways = of_product(linear, x, w)
    assert [way.name for way in ways[:1]] == ([] if rows == 1 else ["amx bfloat16"])
    if rows > 1:
        assert (ways[0].cost >= 0.65) == (rows < 8)


def of_convolution(w: torch.Tensor, groups: int = 1, changing: int = 1, size: int = 28) -> list[Variant]:
    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        edge = w.shape[2] // 2
        return torch.convolution(x, w, None, [1, 1], [edge, edge], [1, 1], False, [0, 0], groups)

    return of_product(convolution, torch.randn(1, w.shape[1] * groups, size, size), w, changing=changing)[2]


def test_convolutions() -> None:
    """Convolutions are products of a matrix that is made as it is read; preferred where it is not made nine times for few outputs."""
    w = torch.randn(128, 64, 1, 1)
    ways = of_convolution(w)
    assert [way.name for way in ways] == ["amx float32", *[f"amx float32 choice {n}" for n in (1, 2, 3)]]
    (kernel,), (packed,) = ways[0].kernels, ways[0].packed
    assert isinstance(kernel, CpuConvKernel)
    assert isinstance(kernel.weight, AmxTiles)
    assert (ways[0].is_preferred, ways[0].is_exact) == (True, False)
    assert packed.buffer in [read.buffer for read in kernel.reads]
    assert torch.equal(packed.pack(w).view(torch.int16), pack_conv_tiles(w, FORMATS["float32"]).view(torch.int16))
    few = of_convolution(torch.randn(32, 64, 3, 3))
    assert few[0].cost > ways[0].cost


def test_grouped_convolutions() -> None:
    """Groups of floating point stay apart, each with its own tiles."""
    w = torch.randn(128, 32, 3, 3).bfloat16()
    ways = of_convolution(w, groups=4)
    (kernel,), (packed,) = ways[0].kernels, ways[0].packed
    assert isinstance(kernel, CpuConvKernel)
    assert isinstance(kernel.weight, AmxTiles)
    assert (kernel.groups, ways[0].is_preferred) == (4, True)
    each = [pack_conv_tiles(part, FORMATS["bfloat16"]) for part in w.chunk(4)]
    assert torch.equal(packed.pack(w).view(torch.int16), torch.cat(each).view(torch.int16))


def test_where_tiles_do_not_serve_convolutions() -> None:
    """Groups or images whose channels do not fill a vector, a weight known only at run time, hardly any pixels."""
    assert not of_convolution(torch.randn(64, 8, 3, 3), groups=4)
    assert not of_convolution(torch.randn(64, 3, 3, 3))
    assert not of_convolution(torch.randn(64, 64, 3, 3), changing=2)
    assert not of_convolution(torch.randn(64, 64, 3, 3), size=2)


@pytest.mark.parametrize(
    ("dtype", "zero", "served"),
    [(torch.uint8, 0, True), (torch.uint8, 9, False), (torch.int8, 0, False), (torch.int8, -128, False)],
)
def test_tiles_do_not_serve_pixels_that_are_moved(
    dtype: torch.dtype, zero: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of taps count signed pixels and what lies around an image as other numbers than they are; tiles would not."""
    monkeypatch.setattr(
        amx, "_CONCEIVABLE_COST", 1e9
    )  # depthwise ones cost too much on tiles; that is not what is asked
    kernel, _, _ = made((1, 64, 28, 28), (3, 3), 1, 1, dtype, zero)
    view = of_product(linear, torch.randn(40, 100), torch.randn(96, 100))[0].packed[0]
    weight = Packed(kernel.weight.buffer, view.source, view.view, view.ahead)
    assert bool(amx.tile_convolutions(kernel, weight, SAPPHIRE_RAPIDS)) == served
