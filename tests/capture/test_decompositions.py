"""Operators that a captured graph holds, and the formulas of decompositions."""

from __future__ import annotations

import operator as operators

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as everyone writes it)
from torch import nn

from tests.fake_devices import FakeDevices
from torch_hybrid_backend.capture import decompositions
from torch_hybrid_backend.capture.decompositions import KEPT, decomposition_table
from torch_hybrid_backend.graph.schema import is_random

aten = torch.ops.aten


def run(recorder, function, *inputs, tolerance=1e-5, **options):
    with torch.no_grad():
        actual, expected = recorder.compile(function, **options)(*inputs), function(*inputs)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_stride=True)
    return set(recorder.operators())


def test_softmax_is_taken_apart(recorder):
    """Softmax is amax, sub, exp, sum, div."""
    assert run(recorder, lambda x: x.softmax(-1), torch.randn(3, 5)) == {
        "aten.amax.default",
        "aten.sub.Tensor",
        "aten.exp.default",
        "aten.sum.dim_IntList",
        "aten.div.Tensor",
    }


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.BatchNorm2d(4), nn.RMSNorm(6)],
    ids=lambda norm: type(norm).__name__,
)
def test_normalisations_are_two_pass(recorder, norm):
    """Normalisations survive a large common offset (two-pass variance), and hold only primitives."""
    x = 100 + torch.randn(2, 4, 5, 6)
    operators = run(recorder, norm, x, tolerance=1e-4)
    assert not any("norm" in name or "as_strided" in name for name in operators)
    assert ("aten.var_mean.correction" in operators) == (not isinstance(norm, nn.RMSNorm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_group_norm_of_half_types(recorder, dtype):
    """Group norm computes in float32 for half types, keeping the dtype outside; channels-last stays channels-last."""
    x = torch.randn(2, 4, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    run(recorder, nn.GroupNorm(2, 4).to(dtype), x, tolerance=2e-2)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.gelu, "gelu"),
        (F.silu, "silu"),
        (F.hardswish, "hardswish"),
        (F.hardsigmoid, "hardsigmoid"),
        (F.softplus, "softplus"),
        (F.mish, "mish"),
        (F.elu, "elu"),
        (F.leaky_relu, "leaky_relu"),
        (F.relu6, "hardtanh"),
        (lambda x: F.avg_pool2d(x, 2), "avg_pool2d"),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "reflection_pad2d"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "upsample_nearest2d"),
        (lambda x: F.interpolate(x, size=(7, 7), mode="bilinear"), "upsample_bilinear2d"),
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), "upsample_bicubic2d"),
    ],
)
def test_kept_whole(recorder, function, name):
    """Activations, pooling, padding and upsampling are one operator each."""
    assert run(recorder, function, torch.randn(2, 3, 4, 4)) == {f"aten.{name}.default"}


def test_attention_is_kept_whole(recorder):
    """Scaled dot-product attention stays one operator."""
    q = torch.randn(1, 2, 8, 8)
    operators = run(recorder, lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in operators


def test_upsampling_formulas_are_restored():
    """After capture torch's own tracing kernels for upsampling are in place again."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    assert key in aten.upsample_bilinear2d.vec.py_kernels


_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")


@pytest.mark.parametrize(
    ("mode", "by"),
    [
        *((mode, "size") for mode in _MODES),
        *(pytest.param(m, "scale", marks=() if m in ("nearest", "bilinear") else pytest.mark.full) for m in _MODES),
    ],
)
def test_upsampling_to_symbolic_sizes(recorder, mode, by):
    """Upsampling to sizes, or by scales, of symbolic tensors is one operator, with eager's values and gradients."""
    rank = {"linear": 1, "trilinear": 3}.get(mode, 2)

    def function(x, like):
        if by == "scale":
            return F.interpolate(x, scale_factor=1.7, mode=mode)
        return F.interpolate(x, size=like.shape, mode=mode)

    for sizes in ((4, 5, 6), (7, 3, 9)):
        x, like = torch.randn(1, 2, *sizes[:rank]), torch.randn(*range(5, 5 + rank))
        operators = run(recorder, function, x, like, dynamic=True)
        assert any("upsample" in name for name in operators)
        assert not any("index" in name for name in operators)
        leaf = x.clone().requires_grad_()
        ours = recorder.compile(function, dynamic=True)(leaf, like)
        (gradient,) = torch.autograd.grad(ours.square().sum(), leaf)
        (expected,) = torch.autograd.grad(function(leaf, like).square().sum(), leaf)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("shifts", "dims"), [((1, -2), (0, 1)), (3, 1), (2, ()), (0, 0), ((4, 0), (0, 1)), (-9, 1)])
def test_roll(recorder, shifts, dims):
    """Rolls by slices and cat equal eager's, for every sign and size of shift; no gathers."""
    operators = run(recorder, lambda x: torch.roll(x, shifts, dims), torch.randn(4, 5))
    assert not any("index" in name for name in operators)


def test_split_becomes_slices(recorder):
    """chunk, split and unbind give single-output views."""
    operators = run(
        recorder, lambda x: [p * 2 for p in (*x.chunk(2), *x.split([1, 3]), *x.unbind(1))], torch.randn(4, 3)
    )
    assert operators == {"aten.slice.Tensor", "aten.mul.Tensor", "aten.squeeze.dims"}


def test_scales_of_rows_are_taken_apart(recorder):
    """Scales of rows become plain operators, whose dtypes are those of eager's results; PyTorch tells others of the operator."""
    operators = run(
        recorder,
        lambda x: torch.ops.quantized_decomposed.choose_qparams_per_token.default(x, torch.int8),
        torch.randn(4, 5),
    )
    assert operators == {
        "aten.abs.default",
        "aten.amax.default",
        "aten.clamp.default",
        "aten.div.Tensor",
        "aten.full_like.default",
    }


def test_keep_ops_are_never_taken_apart(recorder):
    """An engine's keep_ops stay whole although the table would take them apart."""
    operators = run(recorder, lambda x: x.softmax(-1), torch.randn(3, 5), keep_ops=(aten._softmax.default,))
    assert operators == {"aten._softmax.default"}


def test_table():
    """No random operator, nothing kept and no keep_op has a formula."""
    table = decomposition_table(frozenset({aten.native_layer_norm.default}))
    assert aten.native_layer_norm.default not in table
    assert not any(is_random(operator) for operator in table)
    assert not any(getattr(packet, name) in table for packet in KEPT for name in packet.overloads())


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Softmax(-1),
        nn.LogSoftmax(1),
        nn.Hardswish(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_backward_formulas(recorder, module):
    """Gradients through decomposed backward graphs are eager's."""
    x = torch.randn(2, 4, 5, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    recorder.compile(module)(x).square().sum().backward()
    module(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    assert not any("norm" in name or "softmax" in name for name in recorder.operators(1))


@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("images", "module"),
    [
        ((2, 3, 4, 4), nn.Conv2d(3, 64, 3, stride=2, padding=1)),
        ((1, 5, 32, 3), nn.Conv2d(5, 40, (3, 1), padding=(1, 0), stride=(3, 1), bias=False)),
        ((2, 8, 5, 5), nn.Conv2d(8, 40, 3, stride=2, padding=1, dilation=2)),
        ((3, 4, 2, 2), nn.Conv2d(4, 64, 1)),
        ((1, 2, 1, 1), nn.Conv2d(2, 9, 3, padding=1)),
    ],
)
def test_weight_gradient_of_small_images_is_a_product(recorder, images, module, memory_format, frozen):
    """Few output positions: the weight's gradient is one matrix product, whatever else is asked for; strides are eager's."""
    module = module.double().to(memory_format=memory_format).requires_grad_(frozen != "weight")
    wanted = [*module.parameters()] if frozen != "weight" else []
    x = torch.randn(images, dtype=torch.float64, requires_grad=frozen != "input")
    wanted += [x] if frozen != "input" else []
    y = module(x)
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, wanted, gradient)
    actual = torch.autograd.grad(recorder.compile(module, dynamic=False)(x), wanted, gradient)
    torch.testing.assert_close(actual, expected, check_stride=True)
    pointwise_last = module.kernel_size == (1, 1) and memory_format == torch.channels_last  # its strides are no order's
    assert ("aten.mm.default" in recorder.operators(1)) == (frozen != "weight" and not pointwise_last)


@pytest.mark.parametrize(
    ("module", "is_convolution"),
    [
        (nn.Conv2d(4, 6, 3, padding=1), True),
        (nn.Conv2d(4, 6, (2, 5), padding=(0, 3)), True),
        (nn.Conv2d(6, 6, 3, groups=6, bias=False), True),
        (nn.Conv2d(4, 6, 1), True),
        (nn.Conv2d(4, 6, 3, stride=2), False),
        (nn.Conv2d(4, 6, 3, dilation=2), False),
        (nn.Conv2d(4, 6, 1, padding=1), False),  # more padding than kernel: positions that no pixel reaches
        (nn.Conv2d(6, 4, 3, groups=2), False),
        (nn.Conv2d(4, 6, 2, stride=2), False),  # the last column is in no window
        (nn.Conv2d(4, 6, (3, 4), stride=(3, 4)), True),  # windows side by side
        (nn.ConvTranspose2d(4, 6, 2, stride=2), True),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), True),
        (nn.ConvTranspose2d(4, 6, 3, stride=(1, 2), padding=(0, 2), dilation=2, groups=2, bias=False), True),
        (nn.ConvTranspose2d(4, 6, 3, dilation=2, output_padding=1), False),  # outputs that no pixel reaches
    ],
)
def test_image_gradients_are_convolutions(recorder, module, is_convolution):
    """With stride 1 the image's gradient is a convolution by the weight turned around, with windows side by side a transposed one; that of a
    transposed convolution is a convolution. The weight's keeps its operator."""
    module = module.double()
    x = torch.randn(3, module.in_channels, 9, 8, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    y = module(x)
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, wanted, gradient)
    actual = torch.autograd.grad(recorder.compile(module, dynamic=False)(x), wanted, gradient)
    torch.testing.assert_close(actual, expected, check_stride=True)
    assert ("aten.convolution.default" in recorder.operators(1)) == is_convolution
    assert "aten.convolution_backward.default" in recorder.operators(1)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(4, 8, 3), nn.Conv2d(8, 64, 1, groups=4), nn.ConvTranspose2d(4, 64, 1), nn.Conv1d(4, 64, 3)]
)
def test_other_convolution_gradients_stay_whole(recorder, module):
    """Large images, groups, transposed convolutions and other ranks keep their operator."""
    x = torch.randn(2, module.in_channels, *[6 if module.out_channels == 8 else 3] * (module.weight.dim() - 2))
    y = recorder.compile(module, dynamic=False)(x).sum()
    y.backward()
    assert "aten.convolution_backward.default" in recorder.operators(1)
    assert "aten.mm.default" not in recorder.operators(1)


@pytest.mark.parametrize("count", [4, 50])
def test_additions_of_slices_stay_whole(recorder, count):
    """Operators that engines do not take are left to eager's own kernel, not to its slower index_put."""
    operator = "aten.index_add.default"
    index, source = torch.arange(count) % 3, torch.randn(count, 6)
    assert operator in run(recorder, lambda x: x.index_add(0, index, source, alpha=2), torch.randn(7, 6))
    assert operator in run(recorder, lambda x: x.index_add(-1, index, source.T), torch.randn(6, 7))


def test_gpus_keep_what_is_taken_apart_for_the_cpu():
    """The weight's gradient of a convolution with few positions: libraries of GPUs have one kernel for it."""
    devices = FakeDevices()

    def gradient(g, x, w):
        geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return aten.convolution_backward(g, x, w, None, *geometry, [False, True, False])[1]

    kept = {}
    for device in ("cpu", "cuda:1"):
        inputs = [devices.tensor(*s, device=device) for s in ((1, 64, 2, 2), (1, 8, 2, 2), (64, 8, 3, 3))]
        nodes = devices.captured(gradient, *inputs).graph_module.graph.nodes
        kept[device] = "aten.convolution_backward.default" in {str(node.target) for node in nodes}
    assert kept == {"cpu": False, "cuda:1": True}


@pytest.mark.parametrize("operator", ["flash", "efficient", "cudnn"])
def test_attention_of_cuda_stays_whole(operator):
    """The operators that PyTorch chooses among on CUDA, for engines and for eager alike."""
    devices = FakeDevices()
    attention = getattr(aten, f"_scaled_dot_product_{operator}_attention")
    mask = () if operator == "flash" else (None, False)
    q = devices.tensor(1, 2, 8, 16, device="cuda:0", dtype=torch.float16)
    graph = devices.captured(lambda q: torch.relu(attention(q, q, q, *mask)[0]), q).graph_module.graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called == [attention.default, operators.getitem, aten.relu.default]


def test_what_is_asked_before_it_is_applied() -> None:
    """A formula that is not to be applied leaves its operator whole; each is named."""
    names: list[str] = []

    def applies(what: str) -> bool:
        names.append(what)
        return "silu" not in what

    aten = torch.ops.aten
    table = decompositions.asked({aten.silu.default: torch.sin, aten.relu.default: torch.cos}, applies)
    assert table[aten.silu.default](torch.ones(1)) is NotImplemented
    assert table[aten.relu.default](torch.zeros(1)) == 1
    assert names == ["the decomposition of aten.silu.default", "the decomposition of aten.relu.default"]
