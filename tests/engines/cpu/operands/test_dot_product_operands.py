"""Products of integers and of bfloat16 by dot products: bit-equal to int64, whatever instructions there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.engines.cpu.regions_for_tests import compiled_region
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.isa import widest_lanes
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packed_operands import packed_operands
from torch_hybrid_backend.engines.cpu.operations import CpuConvOp
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import Buffer, IntegerConvOp
from torch_hybrid_backend.machine import may_use_tiles

quantized = torch.ops.quantized_decomposed

HOST = Target.host().permitted(may_use_tiles)
# What this processor has, with VNNI of 256 bits, and with less: instruction sets in the order of `dot_products.py`.
WITHOUT_VNNI = tuple(f for f in HOST.features if f not in ("avx512_vnni", "avx_vnni", "avx512_bf16"))
AVX2 = tuple(f for f in WITHOUT_VNNI if not f.startswith(("avx512", "amx")))
TARGETS = {
    "host": HOST,
    "narrow": dataclasses.replace(HOST, lanes=min(8, HOST.lanes)),
    "without vnni": dataclasses.replace(HOST, features=WITHOUT_VNNI, lanes=widest_lanes(WITHOUT_VNNI)),
    "avx2": dataclasses.replace(HOST, features=AVX2, lanes=widest_lanes(AVX2)),
    "plain": dataclasses.replace(HOST, lanes=4),
}
# Their instructions are those of another target, at another width.
_LIKE_OTHERS = ("narrow", "without vnni")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, id=name.replace(" ", "_"), marks=pytest.mark.full if name in _LIKE_OTHERS else ())
        for name in TARGETS
    ],
)
def engine(request: pytest.FixtureRequest) -> KernelEngine:
    return KernelEngine(TvmBackend(TARGETS[request.param]), Config(compile_threads=2), services())


def computed(
    engine: KernelEngine, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, str]:
    """The region's result, and what its kernels are called."""
    _, compiled, _ = compiled_region(engine, (function, lambda: inputs))
    assert compiled.program is not None
    return compiled(list(inputs))[0], " ".join(getattr(step, "symbol", "") for step in compiled.program.steps)


def integer_kernels(compiled: KernelRegion) -> int:
    """The number of a region's kernels that multiply integers: with sums of int32."""
    kernels = [kernel for option in compiled.options for kernel in option.chosen.variant.kernels]
    products = (kernel for kernel in kernels if isinstance(kernel, CpuMatMulKernel))
    return sum(kernel.accumulator.dtype == "int32" for kernel in products)


def extreme(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Integers of 8 bits, every other one the largest or the smallest."""
    info = torch.iinfo(dtype)
    drawn = torch.randint(info.min, info.max + 1, tuple(shape), dtype=torch.int32)
    ends = torch.where(torch.rand(tuple(shape)) < 0.5, info.min, info.max)
    return torch.where(torch.rand(tuple(shape)) < 0.5, ends, drawn).to(dtype)


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [
        (1, 64, 48, torch.int8),
        (5, 16, 5, torch.uint8),
        (33, 77, 50, torch.int8),
        (7, 4096, 33, torch.uint8),
        (3, 70_000, 20, torch.int8),
        (2, 70_000, 5, torch.uint8),
    ],
)
def test_matmuls_of_integers_are_exact(engine: KernelEngine, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """`_int_mm`, odd sizes, K that fills no word, and the extremes of both dtypes."""
    torch.manual_seed(0)
    a, b = extreme((m, k), dtype), extreme((k, n), torch.int8)
    b[:, 0] = 101  # sums beyond what float32 holds exactly
    found, names = computed(engine, torch._int_mm, [a, b])
    assert torch.equal(found.long(), a.long() @ b.long())
    assert "packed_matmul" in names or "tile_matmul" in names


@pytest.mark.parametrize("zero", [0, 3, 200])
def test_a_zero_point_and_scales_are_taken_in(engine: KernelEngine, zero: int) -> None:
    """Scales by row and column; the sums themselves are exact, so what is left is the rounding of four float32 operations."""
    torch.manual_seed(0)
    x, w = extreme((9, 40), torch.uint8), extreme((24, 40), torch.int8)
    columns, rows = torch.rand(24) + 0.5, torch.rand(9) + 0.5

    def linear(x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        left = (x.float() - zero) * rows[:, None]
        return torch.mm(left, (w.float() * columns[:, None]).t())

    found, names = computed(engine, linear, [x, rows, w, columns])
    exact = (x.double() - zero) @ w.double().t() * rows.double()[:, None] * columns.double()
    torch.testing.assert_close(found.double(), exact, rtol=4e-7, atol=0)
    assert names.count("packed_matmul") == 1


@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 48), (9, 77, 50), (33, 2048, 17)])
@pytest.mark.parametrize(
    ("left", "right"), [((torch.uint8, 0), (torch.uint8, 200)), ((torch.int8, -7), (torch.int8, 3))]
)
def test_zero_points_of_both_operands_are_taken_off(
    engine: KernelEngine, m: int, k: int, n: int, left: tuple[torch.dtype, int], right: tuple[torch.dtype, int]
) -> None:
    """Zero points are taken off matrices of a batch, both made in the call: the sums are exact, so what is left is the rounding of two float32
    operations."""
    torch.manual_seed(0)
    (left_dtype, left_zero), (right_dtype, right_zero) = left, right
    x, w = extreme((2, m, k), left_dtype), extreme((2, n, k), right_dtype)
    x[0, 0] = torch.iinfo(left_dtype).max  # the largest sums there are
    w[0, 0] = torch.iinfo(right_dtype).min

    def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm((x.float() - left_zero) * 0.25, ((w.float() - right_zero) * 0.3).transpose(1, 2))

    _, compiled, inputs = compiled_region(engine, (scores, lambda: [x, w]))
    exact = (x.long() - left_zero) @ (w.long() - right_zero).transpose(1, 2)
    wanted = exact.double() * 0.25 * torch.tensor(0.3).double()
    torch.testing.assert_close(compiled(inputs)[0].double(), wanted, rtol=4e-7, atol=0)
    assert integer_kernels(compiled) == 1


# What an int32 holds the sums of, whatever the numbers are: a graph's 70,000, and the most that there are.
@pytest.mark.parametrize("k", [70_000, 131_071])
def test_long_sums_of_dequantized_operands_are_exact(engine: KernelEngine, k: int) -> None:
    """int8 by int8, quantized and dequantized: sums of int32 that a float32 would round, the largest that there can be among them."""
    torch.manual_seed(0)
    x, w = torch.randint(-128, 128, (3, k)).float(), torch.randint(90, 128, (6, k), dtype=torch.int8)
    x[1], w[1], x[2] = -128, -128, x[2].abs().clamp(80, 127)

    def linear(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        narrow = quantized.quantize_per_tensor.default(x, 1.0, 0, -128, 127, torch.int8)
        rows = quantized.dequantize_per_tensor.default(narrow, 1.0, 0, -128, 127, torch.int8)
        columns = quantized.dequantize_per_channel.default(w, scales, None, 0, -128, 127, torch.int8)
        return torch.mm(rows, columns.t())

    _, compiled, inputs = compiled_region(engine, (linear, lambda: [x, w, torch.full((6,), 0.5)]))
    exact = x.long() @ w.long().t()
    assert exact[1, 1] == k << 14
    assert (exact.double() != exact.float().double()).any()
    assert torch.equal(compiled(inputs)[0], exact.float() * 0.5)
    assert integer_kernels(compiled) == 1


# Zero points of the image's rows: a literal, one for each row, one number that only int64 holds.
ZERO_POINTS = {
    "literal": lambda x: 1e6,
    "row": lambda x: x[:, :1].long() * 400_001 - 3,
    "tensor": lambda x: x[:1, :1].long() * (1 << 26),
}


@pytest.mark.parametrize("kind", ZERO_POINTS)
@pytest.mark.parametrize("k", [64, 999])
def test_zero_points_of_any_size_are_taken_off(engine: KernelEngine, kind: str, k: int) -> None:
    """Corrected sums that no int32 holds, of a zero point that is known ahead or comes with the call: rounded to float32 once."""
    torch.manual_seed(0)
    x, w, zero = extreme((8, k), torch.uint8), torch.full((24, k), 127, dtype=torch.int8), ZERO_POINTS[kind]
    x[0, 0], w[::2] = 200, extreme((12, k), torch.int8)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.float() - zero(x), w.float().t())

    _, compiled, inputs = compiled_region(engine, (linear, lambda: [x, w]))
    exact = (x.double() - zero(x)) @ w.double().t()
    assert exact.abs().max() > 2**31
    torch.testing.assert_close(compiled(inputs)[0].double(), exact, rtol=2**-23, atol=0)
    assert integer_kernels(compiled) == 1


@pytest.mark.parametrize("per", ["token", "tensor"])
def test_zero_points_that_calls_choose_leave_a_product_of_integers(engine: KernelEngine, per: str) -> None:
    """Products stay integer with zero points that calls choose, as torchao's dynamic quantization does: nothing in the graph bounds a zero
    point that lies in memory."""
    torch.manual_seed(0)
    x, w, scales = torch.randn(9, 64) + 0.7, extreme((24, 64), torch.int8), torch.rand(24) + 0.5

    def rows(x: torch.Tensor) -> torch.Tensor:
        if per == "token":
            scale, zero = quantized.choose_qparams_per_token_asymmetric.default(x, torch.int8)
            narrow = quantized.quantize_per_token.default(x, scale, zero, -128, 127, torch.int8)
            return quantized.dequantize_per_token.default(narrow, scale, zero, -128, 127, torch.int8, torch.float32)
        scale, zero = quantized.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
        narrow = quantized.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        return quantized.dequantize_per_tensor.tensor(narrow, scale, zero, 0, 255, torch.uint8)

    def linear(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        left = rows(x)
        return torch.mm(left, quantized.dequantize_per_channel.default(w, scales, None, 0, -128, 127, torch.int8).t())

    _, compiled, inputs = compiled_region(engine, (linear, lambda: [x, w, scales]))
    want = rows(x).double() @ (w.double() * scales.double()[:, None]).t()
    torch.testing.assert_close(compiled(inputs)[0].double(), want, rtol=1e-5, atol=1e-4)
    assert integer_kernels(compiled) == 1


# (shape of a, shape of b, dtype of a, dtype of b, zero point of a)
TWO_ACTIVATIONS = [
    ((12, 33, 64), (12, 64, 50), torch.int8, torch.int8, 0),
    ((3, 17, 70), (3, 70, 5), torch.int8, torch.int8, -3),
    ((2, 8, 512), (2, 512, 64), torch.uint8, torch.int8, 200),
    ((2, 20, 77), (2, 77, 33), torch.int8, torch.uint8, 0),
    ((2, 5, 16), (2, 16, 40), torch.uint8, torch.uint8, 7),
    ((1, 1, 4096), (1, 4096, 48), torch.int8, torch.int8, 0),
]


@pytest.mark.parametrize("case", TWO_ACTIVATIONS, ids=lambda case: f"{case[0]}_{case[1]}_{case[2]}_{case[3]}")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_two_activations_are_multiplied_as_integers(
    engine: KernelEngine, case: tuple[object, ...], is_transposed: bool
) -> None:
    """Both are quantized in the call: what moves the left one is made up for by sums of columns that are made there too."""
    left, right, of_left, of_right, zero = case
    torch.manual_seed(0)
    x, y = extreme(left, of_left).float() - zero, extreme(right, of_right).float()  # type: ignore[arg-type,operator]
    y = y.transpose(1, 2).contiguous() if is_transposed else y

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        operands = []
        for tensor, dtype, at in ((x, of_left, zero), (y, of_right, 0)):
            ends = torch.iinfo(dtype).min, torch.iinfo(dtype).max, dtype  # type: ignore[arg-type]
            narrow = quantized.quantize_per_tensor.default(tensor, 1.0, at, *ends)
            operands.append(quantized.dequantize_per_tensor.default(narrow, 1.0, at, *ends))
        return torch.bmm(operands[0], operands[1].transpose(1, 2) if is_transposed else operands[1]) * 0.5

    _, compiled, inputs = compiled_region(engine, (product, lambda: [x, y]), changing=2)
    exact = x.double() @ (y.double().transpose(1, 2) if is_transposed else y.double())
    assert torch.equal(compiled(inputs)[0], exact.float() * 0.5)
    assert integer_kernels(compiled) == 1


# (shape of x, shape of w, stride, padding, dilation, groups, dtype of x, zero point)
CONVOLUTIONS = [
    ((1, 16, 9, 9), (32, 16, 3, 3), 1, 1, 1, 1, torch.uint8, 0),
    ((2, 3, 19, 17), (24, 3, 3, 3), 2, 1, 1, 1, torch.int8, 0),
    ((1, 30, 6, 7), (40, 30, 5, 5), 1, 2, 1, 1, torch.uint8, 200),
    ((1, 32, 10, 10), (64, 8, 3, 3), 2, 2, 2, 4, torch.int8, -5),
    ((1, 256, 4, 4), (16, 256, 1, 1), 1, 0, 1, 1, torch.int8, 0),
    ((2, 12, 9, 9), (12, 1, 3, 3), 1, 1, 1, 12, torch.uint8, 7),
    ((1, 6, 9, 9), (9, 2, 3, 3), 1, 1, 1, 3, torch.uint8, 0),
    ((1, 512, 7, 7), (40, 512, 3, 3), 1, 1, 1, 1, torch.uint8, 0),
    ((3, 8, 40), (16, 8, 5), 1, 2, 1, 1, torch.int8, 9),
    # Blocks narrower than vectors.
    ((2, 40, 1, 1), (4, 40, 1, 1), 1, 0, 1, 1, torch.int8, 0),
    ((1, 16, 9, 9), (3, 16, 3, 3), 1, 1, 1, 1, torch.uint8, 0),
    ((1, 32, 9, 9), (16, 8, 3, 3), 1, 1, 1, 4, torch.uint8, 0),
    ((1, 16, 9, 9), (2, 16, 3, 3), 1, 1, 1, 1, torch.uint8, 5),
    # Around the image lies no zero: a kernel too wide to unroll, and a weight that comes in chunks.
    ((1, 8, 3, 40), (8, 8, 2, 17), 1, (1, 8), 1, 1, torch.int8, 3),
    ((1, 512, 7, 7), (96, 512, 3, 3), 1, 1, 1, 1, torch.int8, -4),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: f"{case[0]}_{case[1]}")
def test_convolutions_of_integers_are_exact(engine: KernelEngine, case: tuple[object, ...]) -> None:
    """Padding counts as the zero point, in whatever order sums are made; depthwise ones, and groups that fill no word, are exact too."""
    x_shape, w_shape, stride, padding, dilation, groups, dtype, zero = case
    torch.manual_seed(0)
    x, w = extreme(x_shape, dtype), extreme(w_shape, torch.int8)  # type: ignore[arg-type]
    convolve = torch.nn.functional.conv2d if x.dim() == 4 else torch.nn.functional.conv1d
    places = stride, padding, dilation, groups

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return convolve(x.float() - zero, w.float(), None, *places) * 0.5

    found, _ = computed(engine, function, [x, w])
    exact = convolve(x.double() - zero, w.double(), None, *places)
    assert exact.abs().max() < 2**31
    assert torch.equal(found, exact.float() * 0.5)


@pytest.mark.parametrize("outputs", [1, 2, 6])
@pytest.mark.parametrize("of_integers", [True, False])
def test_words_behind_groups_of_few_channels(engine: KernelEngine, outputs: int, of_integers: bool) -> None:
    """A convolution that writes `outputs` channels a group is followed by one that reads words of them, of bytes or of bfloat16."""
    torch.manual_seed(0)
    groups = 12
    x = torch.randint(-8, 9, (2, 2 * groups, 9, 8)).float()
    v, w = torch.randint(-1, 2, (groups * outputs, 2, 3, 3)).float(), extreme((24, groups * outputs, 3, 3), torch.int8)

    def two(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.conv2d(x, v, None, 1, 1, 1, groups).relu()
        if of_integers:
            return torch.nn.functional.conv2d(inner.round().to(torch.uint8).float(), w.float(), None, 1, 1)
        return torch.nn.functional.conv2d(inner.bfloat16(), w.clamp(-1, 1).bfloat16(), None, 1, 1).float()

    found, _ = computed(engine, two, [x, v, w])
    inner = torch.nn.functional.conv2d(x, v, None, 1, 1, 1, groups).relu()
    weight = w.double() if of_integers else w.clamp(-1, 1).double()
    want = torch.nn.functional.conv2d(inner.double(), weight, None, 1, 1)
    torch.testing.assert_close(found.double(), want, rtol=0 if of_integers else 2**-8, atol=0)


def of_seven_bits(shape: Sequence[int]) -> torch.Tensor:
    """Weights of 7 bits, among them neighbours that are both the largest or both the smallest."""
    return (extreme(shape, torch.int8).int() / 2).round().clamp(-64, 64).to(torch.int8)


def dequantized(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.ops.quantized_decomposed.dequantize_per_channel.default(w, scales, None, 0, -64, 64, torch.int8)


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "zero"),
    [
        (1, 64, 48, torch.int8, 0),
        (6, 70_000, 5, torch.uint8, 3),
        (33, 77, 50, torch.int8, -2),
        (9, 40, 24, torch.uint8, 0),
    ],
)
def test_matmuls_by_weights_of_7_bits_are_exact(
    engine: KernelEngine, m: int, k: int, n: int, dtype: torch.dtype, zero: int
) -> None:
    """Matmuls of bytes are exact where there is no VNNI either: nothing saturates, however large both operands are."""
    torch.manual_seed(0)
    x, w, scales = extreme((m, k), dtype), of_seven_bits((n, k)), torch.full((n,), 2.0**-7)
    x[0], w[0], w[1 : 1 + n // 4] = torch.iinfo(dtype).max, 64, -64
    x[m // 2, 1::3] = w[-1] = 61  # odd, so that float32 does not hold all sums

    def linear(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm((x.float() - zero) * 0.5, dequantized(w, scales).t())

    _, compiled, inputs = compiled_region(engine, (linear, lambda: [x, w, scales]))
    exact = (x.long() - zero) @ w.long().t()
    assert k < 70_000 or (exact.double() != exact.float().double()).any()
    assert torch.equal(compiled(inputs)[0], exact.float() * 2.0**-8)
    assert integer_kernels(compiled) == 1


@pytest.mark.parametrize("kind", ["matmul", "convolution", "depthwise"])
def test_weights_beyond_the_bounds_that_the_graph_names_are_clamped(engine: KernelEngine, kind: str) -> None:
    """Whatever instruction multiplies them, so that no sum of two products leaves 16 bits."""
    torch.manual_seed(0)
    x_shape, w_shape = {
        "matmul": ((9, 40), (24, 40)),
        "convolution": ((1, 16, 9, 9), (32, 16, 3, 3)),
        "depthwise": ((1, 32, 9, 9), (32, 1, 3, 3)),
    }[kind]
    x, w, scales = extreme(x_shape, torch.uint8), extreme(w_shape, torch.int8), torch.full((w_shape[0],), 0.5)

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            return torch.mm(x, w.t())
        return torch.nn.functional.conv2d(x, w, None, 1, 1, 1, x.shape[1] // w.shape[1])

    found, names = computed(engine, lambda x, w, scales: product(x.float(), dequantized(w, scales)), [x, w, scales])
    assert names.count("map") <= 1  # of the image or the rows: weights are clamped and packed ahead of calls
    assert torch.equal(found, product(x.double(), w.double().clamp(-64, 64)).float() * 0.5)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: f"{case[0]}_{case[1]}")
def test_convolutions_by_weights_of_7_bits_are_exact(engine: KernelEngine, case: tuple[object, ...]) -> None:
    """The same for convolutions; those that are not multiplied in words know nothing of the bounds."""
    x_shape, w_shape, stride, padding, dilation, groups, dtype, zero = case
    torch.manual_seed(0)
    x, w = extreme(x_shape, dtype), of_seven_bits(w_shape)  # type: ignore[arg-type]
    convolve = torch.nn.functional.conv2d if x.dim() == 4 else torch.nn.functional.conv1d
    places = stride, padding, dilation, groups

    def function(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return convolve(x.float() - zero, dequantized(w, scales), None, *places)

    found, _ = computed(engine, function, [x, w, torch.full((w.shape[0],), 0.5)])
    exact = convolve(x.double() - zero, w.double(), None, *places)
    assert torch.equal(found, exact.float() * 0.5)


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "zero", "dtype"),
    [
        (32, (3, 3), 1, 0, torch.uint8),
        (40, (5, 5), 2, 0, torch.uint8),
        (20, (3, 3), 1, 3, torch.uint8),
        (33, (5, 5), 1, 0, torch.int8),
        (17, (7, 7), 2, -9, torch.int8),
        (16, (9, 9), 1, 0, torch.uint8),
    ],
)
def test_depthwise_convolutions_of_quantized_images_are_exact(
    engine: KernelEngine, channels: int, kernel: tuple[int, int], stride: int, zero: int, dtype: torch.dtype
) -> None:
    """Those that words of taps take, signed ones and those with a zero point too, and wider windows, which they do not."""
    torch.manual_seed(0)
    x, w, limits = torch.randn(2, channels, 11, 13), extreme((channels, 1, *kernel), torch.int8), torch.iinfo(dtype)

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(x * 90) + zero, limits.min, limits.max).to(dtype)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        image = quantized(x).float() - zero
        return torch.nn.functional.conv2d(image, w.float(), None, stride, kernel[0] // 2, 1, channels) * 0.5

    found, _ = computed(engine, function, [x, w])
    image = quantized(x).double() - zero
    exact = torch.nn.functional.conv2d(image, w.double(), None, stride, kernel[0] // 2, 1, channels)
    assert torch.equal(found, exact.float() * 0.5)


@pytest.mark.skipif(HOST.lanes < 16 or "avx512_vnni" not in HOST.features, reason="this processor has no AVX-512 VNNI")
def test_taps_are_words_in_windows_of_few_columns() -> None:
    """Images of the region's own, in whole blocks of channels, signed or not; sums start at what pixels are moved by."""

    def packed(zero: int, dtype: str, width: int) -> tuple[tuple[int, ...], bool]:
        image, out = Buffer((1, 32, 9, 9), dtype), Buffer((1, 32, 9, 9), "int32")
        weight = Buffer((32, 1, 3, width), "int8", constant=True)
        op = IntegerConvOp(out, image, weight, (1, 1), (1, width // 2), (1, 1), 32, zero)
        prepared = packed_operands(LoopGraph((weight,), (out,), (), (op,)), {}, HOST)
        (made,) = (op for op in prepared.graph.ops if isinstance(op, CpuConvOp))
        return made.weight.buffer.shape, made.weight.start is not None

    assert packed(0, "uint8", 3) == packed(-128, "int8", 3) == ((2, 3, 1, 16, 4), False)
    assert packed(0, "uint8", 7) == ((2, 3, 2, 16, 4), False)
    assert packed(3, "uint8", 3) == packed(0, "int8", 3) == ((2, 3, 1, 16, 4), True)
    assert packed(0, "uint8", 9) == ((2, 3, 9, 16), False)


@pytest.mark.parametrize("pad", [(0, 1, 0, 1), (1, 0, 2, 0), (0, 3, 1, 0)])
@pytest.mark.parametrize(("dtype", "zero"), [(torch.int8, 0), (torch.uint8, 9)])
def test_padding_on_one_side_is_exact(
    engine: KernelEngine, pad: tuple[int, ...], dtype: torch.dtype, zero: int
) -> None:
    """Padding on one side is exact, as TensorFlow's networks have it; of many channels and of an image's three."""
    torch.manual_seed(0)
    for channels in (32, 3):
        x, w = extreme((2, channels, 10, 11), dtype), extreme((24, channels, 3, 3), torch.int8)

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            around = torch.nn.functional.pad(x.float() - zero, pad)
            return torch.nn.functional.conv2d(around, w.float(), None, 2) * 0.5

        found, _ = computed(engine, function, [x, w])
        around = torch.nn.functional.pad(x.double() - zero, pad)
        assert torch.equal(found, torch.nn.functional.conv2d(around, w.double(), None, 2).float() * 0.5)


@pytest.mark.parametrize("zero", [0, 5])
def test_a_signed_image_with_padding_is_not_copied(zero: int) -> None:
    """The kernel that makes it moves it; what lies around it is the convolution's."""
    torch.manual_seed(0)
    x, first, second = (
        extreme((1, 16, 9, 9), torch.uint8),
        extreme((32, 16, 1, 1), torch.int8),
        extreme((16, 32, 3, 3), torch.int8),
    )

    def block(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x.float(), first.float()) * 1e-3
        y = torch.clamp(torch.round(y) + zero, -128, 127).to(torch.int8).float() - zero
        return torch.nn.functional.conv2d(y, second.float(), None, 1, 1)

    engine = KernelEngine(TvmBackend(HOST), Config(compile_threads=1), services())
    found, names = computed(engine, block, [x, first, second])
    kinds = [name.split("_")[0].replace("tile", "packed") for name in names.split()]
    assert kinds == ["map", "packed", "packed"]  # the first puts the input into blocked channels
    y = torch.clamp(torch.round(torch.nn.functional.conv2d(x.float(), first.float()) * 1e-3) + zero, -128, 127) - zero
    assert torch.equal(found.double(), torch.nn.functional.conv2d(y.double(), second.double(), None, 1, 1))


def test_a_result_that_is_quantized_again_is_one_kernel() -> None:
    """Convolution, bias, ReLU, a sum and requantization: nothing of float32 lies in memory."""
    torch.manual_seed(0)
    x, w = extreme((1, 16, 8, 8), torch.uint8), extreme((32, 16, 1, 1), torch.int8)
    other, bias = extreme((1, 32, 8, 8), torch.uint8), torch.randn(32)

    def block(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x.float() * 0.02, w.float() * 0.01, bias)
        y = torch.relu(y + other.float() * 0.03)
        return torch.clamp(torch.round(y / 0.04), 0, 255).to(torch.uint8)

    engine = KernelEngine(TvmBackend(HOST), Config(compile_threads=1), services())
    region, compiled, inputs = compiled_region(engine, (block, lambda: [x, w, bias, other]))
    assert compiled.program is not None
    names = [getattr(step, "symbol", "") for step in compiled.program.steps]
    kinds = [name.split("_")[0].replace("tile", "packed") for name in names]  # AMX's, where the processor has it
    assert kinds == ["map", "packed"]  # the first puts the input into blocked channels
    difference = compiled(inputs)[0].int() - region.eager(inputs)[0].int()
    assert difference.abs().max() <= 1


@pytest.mark.skipif("avx512_bf16" not in HOST.features, reason="this processor has no AVX-512 BF16")
@pytest.mark.parametrize("kind", ["mm", "bmm", "conv", "grouped"])
def test_products_of_bfloat16(kind: str) -> None:
    """Sums in float32, as close to float64 as eager's."""
    torch.manual_seed(0)
    shapes = {
        "mm": ((33, 78), (78, 40)),
        "bmm": ((3, 20, 32), (3, 32, 24)),
        "conv": ((2, 14, 9, 9), (32, 14, 3, 3)),
        "grouped": ((1, 32, 9, 9), (64, 8, 3, 3)),
    }[kind]
    x, w = (torch.randn(shape).bfloat16() for shape in shapes)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dim() < 4:
            return torch.matmul(x, w)
        return torch.nn.functional.conv2d(x, w, None, 1, 1, 1, x.shape[1] // w.shape[1])

    engine = KernelEngine(TvmBackend(HOST), Config(compile_threads=1), services())
    found, names = computed(engine, function, [x, w])
    exact = function(x.double(), w.double())
    eager = function(x, w)
    assert (found - exact).square().mean() <= 1.01 * (eager - exact).square().mean()
    assert "packed" in names or "tile" in names
