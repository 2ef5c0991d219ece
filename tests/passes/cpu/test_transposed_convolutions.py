"""Transposed convolutions become convolutions whose channels are spread over pixels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_hybrid_backend.passes.canonical.fold_batch_norm import fold_batch_norm
from torch_hybrid_backend.passes.cpu.transposed_convolutions import transposed_convolutions
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.quantization.quantize import quantize


def _is_transposed(subject) -> bool:
    nodes = subject.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return any(node.args[6] for node in nodes)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "extra"),
    [
        (4, 2, 1, 0),
        (3, 2, 1, 1),
        (3, 2, 0, 0),
        (5, 2, 2, 1),
        (5, 3, 1, 0),
        (2, 2, 0, 1),
        (2, 2, 0, 0),  # kernels that tile the result
        ((2, 3), (2, 3), 0, 0),
        (3, 1, 1, 0),
        ((4, 3), (2, 1), (1, 2), (0, 0)),
        ((3, 7), (4, 3), (0, 2), (1, 2)),
    ],
)
@pytest.mark.parametrize(("channels", "outputs"), [(3, 5), (40, 11)])
@pytest.mark.parametrize("size", [(1, 1), (5, 7)])
def test_images(captured, kernel, stride, padding, extra, channels, outputs, size):
    """Kernels longer, shorter and no multiple of the stride; with few channels, and as many as Winograd's algorithm wants."""
    model = nn.ConvTranspose2d(channels, outputs, kernel, stride, padding, extra)
    if min(torch.tensor(size) * torch.tensor(stride) + torch.tensor(kernel) - 2 * torch.tensor(padding)) < 2:
        return
    subject = captured(model, torch.randn(2, channels, *size), dynamic=False)
    assert subject.apply(transposed_convolutions)
    assert not _is_transposed(subject)


@pytest.mark.parametrize(
    ("kernel", "padding", "extra", "is_taken"), [(4, 1, 0, True), (2, 0, 0, True), (3, 1, 1, False), (3, 1, 0, False)]
)
def test_images_of_sizes_known_at_run_time(captured, kernel, padding, extra, is_taken):
    """Taken where the kernel is as long as the stride and twice the padding."""
    model = nn.ConvTranspose2d(3, 5, kernel, 2, padding, extra)
    subject = captured(model, torch.randn(2, 3, 6, 7), dynamic=True)
    assert subject.apply(transposed_convolutions) == is_taken
    assert _is_transposed(subject) != is_taken


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(16, 8, 4), (7, 3, 0), (5, 1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_signals(captured, kernel, stride, padding, bias):
    """Signals of one dimension, as vocoders upsample."""
    model = nn.ConvTranspose1d(6, 3, kernel, stride, padding, bias=bias)
    subject = captured(model, torch.randn(1, 6, 13), dynamic=False)
    assert subject.apply(transposed_convolutions)
    assert not _is_transposed(subject)


def test_weights_are_made_outside_the_call(captured):
    """A batch norm is folded into the weights, whose new order depends on parameters alone."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU()).eval()
    nn.init.uniform_(model[1].running_mean)
    subject = captured(model, torch.randn(2, 4, 5, 3), dynamic=False)
    assert subject.apply(fold_batch_norm, transposed_convolutions)
    names = subject.operators(hoist(subject.gm, subject.ctx.constants).main)
    assert names["convolution.default"] == 1
    assert not {"flip.default", "constant_pad_nd.default", "mul.Tensor"} & set(names)


def test_a_process_that_quantizes_nothing():
    """There PyTorch has no operators of quantized graphs."""
    code = """
import torch, torch_hybrid_backend
model = torch.nn.ConvTranspose2d(4, 6, 2, 2).eval()
x = torch.randn(1, 4, 5, 3)
with torch.no_grad():
    compiled = torch.compile(model, backend="hybrid", options={"placement": "estimate", "strict": True})
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (4, 2, 1), (5, 3, 1)])
def test_quantized_weights_stay_so(captured, kernel, stride, padding):
    """The integers are reordered outside the call, their scales with them, and dequantized in it."""
    model = nn.ConvTranspose2d(4, 6, kernel, stride, padding).eval()
    with torch.no_grad():
        model.weight *= torch.arange(1, 7).view(1, 6, 1, 1)
    x = torch.randn(2, 4, 5, 3)
    subject = captured(quantize(model, [x], "naive"), x, dynamic=False)
    assert subject.apply(transposed_convolutions)
    assert not _is_transposed(subject)
    names = subject.operators(hoist(subject.gm, subject.ctx.constants).main)
    assert names["quantized_decomposed.dequantize_per_channel.default"] == 1
    assert not {"flip.default", "constant_pad_nd.default", "quantized_decomposed.quantize_per_channel.default"} & set(
        names
    )


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(4, 6, 3, 2, groups=2),
        nn.ConvTranspose2d(4, 6, 3, 2, dilation=2),
        nn.ConvTranspose3d(4, 6, 3, 2),
        nn.Conv2d(4, 6, 3),
    ],
    ids=["groups", "dilation", "volumes", "not transposed"],
)
def test_left_alone(captured, model):
    """Convolutions that this formula does not cover are left alone."""
    x = torch.randn(2, 4, *([5] * (model.weight.dim() - 2)))
    assert not captured(model, x, dynamic=False).apply(transposed_convolutions, exact=True)
