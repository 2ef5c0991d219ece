"""Convolutions against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loops.check import FLOATS, check, sample
from loops.interpret import trace
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten

# x shape, w shape, stride, padding, dilation, groups
CASES = {
    "1x1": ((2, 3, 5, 5), (4, 3, 1, 1), [1], [0], [1], 1),
    "3x3": ((1, 3, 6, 5), (4, 3, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "strided": ((2, 3, 9, 8), (4, 3, 3, 2), [2, 3], [1, 0], [1, 1], 1),
    "dilated": ((1, 2, 9, 9), (3, 2, 3, 3), [1, 1], [2, 2], [2, 3], 1),
    "grouped": ((1, 4, 5, 5), (6, 2, 3, 3), [1, 1], [1, 1], [1, 1], 2),
    "depthwise": ((1, 4, 5, 5), (8, 1, 3, 3), [2, 2], [1, 1], [1, 1], 4),
    "1-D": ((2, 3, 9), (4, 3, 3), [2], [1], [1], 1),
}
ANY = Abilities(any_convolution=True)
# x shape, w shape, stride, padding, dilation, transposed, output padding, groups
OTHERS = {
    "3-D": ((1, 4, 4, 5, 3), (6, 2, 2, 3, 1), [1, 2, 1], [0, 1, 0], [2, 1, 1], False, [0, 0, 0], 2),
    "1-D, transposed": ((2, 4, 5), (4, 3, 3), [2], [1], [1], True, [1], 1),
    "2-D, transposed": ((1, 4, 4, 3), (4, 3, 3, 2), [3, 2], [1, 0], [2, 3], True, [1, 2], 2),
    "3-D, transposed": ((1, 3, 2, 3, 2), (3, 2, 3, 3, 2), [2], [1], [1], True, [1], 1),
    "3-D, tiling": ((1, 3, 2, 3, 2), (3, 2, 2, 2, 2), [2], [0], [1], True, [0], 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_convolutions(name: str, dtype: torch.dtype) -> None:
    """Strides, paddings, dilations and groups in one and two dimensions, with and without bias."""
    x_shape, w_shape, stride, padding, dilation, groups = CASES[name]
    x, w = sample(*x_shape, dtype=dtype, low=-1, high=1), sample(*w_shape, dtype=dtype, low=-1, high=1, seed=1)
    b = sample(w_shape[0], dtype=dtype)
    zeros = [0] * len(stride)
    convolve = aten.convolution.default
    check(lambda x, w, b: convolve(x, w, b, stride, padding, dilation, False, zeros, groups), x, w, b)
    check(lambda x, w: convolve(x, w, None, stride, padding, dilation, False, zeros, groups), x, w)


@pytest.mark.parametrize("name", OTHERS)
def test_any_convolution(name: str) -> None:
    """Volumes and overlapping transposed windows, with and without bias, where the kernels can."""
    x_shape, w_shape, stride, padding, dilation, transposed, extra, groups = OTHERS[name]
    x, w = sample(*x_shape, low=-1, high=1), sample(*w_shape, low=-1, high=1, seed=1)
    b = sample(w_shape[1] * groups if transposed else w_shape[0])
    settings = (stride, padding, dilation, transposed, extra, groups)
    check(lambda x, w, b: aten.convolution.default(x, w, b, *settings), x, w, b, abilities=ANY)
    check(lambda x, w: aten.convolution.default(x, w, None, *settings), x, w, abilities=ANY)


def test_explicit_padding_joins() -> None:
    """A constant_pad_nd of zeros before a convolution, more on one side than on the other, is the convolution's own."""
    convolve = aten.convolution.default
    for stride, size in ((2, 8), (1, 5)):
        check(
            _padded_convolution([0, 1, 2, 1], stride),
            sample(1, 2, size, size),
            sample(3, 2, 3, 3),
        )
    # Other values than zero stay in front of it.
    check(
        lambda x, w: convolve(
            aten.constant_pad_nd.default(x, [1, 1, 1, 1], 2.0), w, None, [1], [0], [1], False, [0], 1
        ),
        sample(1, 2, 5, 5),
        sample(3, 2, 3, 3),
    )


def _padded_convolution(pad: list[int], stride: int) -> Callable[..., object]:
    return lambda x, w: aten.convolution.default(
        aten.constant_pad_nd.default(x, pad), w, None, [stride] * 2, [1, 0], [1, 1], False, [0, 0], 1
    )


@pytest.mark.parametrize(("x_shape", "w_shape"), [((2, 3, 4, 5), (3, 2, 2, 3)), ((1, 2, 5), (2, 3, 4))])
def test_tiling_transposed_convolution(x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> None:
    """Windows that tile the result: a matmul and a pixel shuffle."""
    stride, rank = list(w_shape[2:]), len(w_shape) - 2
    convolve = aten.convolution.default
    check(
        lambda x, w, b: convolve(x, w, b, stride, [0] * rank, [1] * rank, True, [0] * rank, 1),
        sample(*x_shape),
        sample(*w_shape),
        sample(w_shape[1]),
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1),
        lambda x, w: aten.convolution.default(
            x[..., None], w[..., None], None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1
        ),
    ],
)
def test_refusals(fn: object) -> None:
    """Overlapping transposed and 3-D convolutions are refused as values, where the kernels cannot."""
    graph = trace(fn, [sample(1, 3, 6, 6), sample(3, 3, 2, 2)]).graph
    (node,) = (n for n in graph.nodes if n.target is aten.convolution.default)
    verdict = supports(node)
    assert not verdict
    assert verdict.code is Reason.ARGUMENT
    assert supports(node, ANY)
