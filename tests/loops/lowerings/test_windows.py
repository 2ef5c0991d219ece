"""Windows unfolded and folded back, against eager."""

from __future__ import annotations

import pytest
import torch

from loops.check import FLOATS, check, sample
from loops.interpret import trace
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten

# kernel, dilation, padding, stride
CASES = {
    "plain": ([2, 2], [1, 1], [0, 0], [1, 1]),
    "patches": ([4, 3], [1, 1], [0, 0], [4, 3]),
    "padded": ([3, 2], [1, 1], [1, 1], [2, 1]),
    "dilated": ([2, 3], [2, 1], [1, 0], [1, 2]),
    "gaps": ([2, 2], [1, 1], [0, 0], [3, 3]),
}
# kernel, stride, padding, dilation, ceil_mode
POOLS = {
    "plain": ([2, 2], [], [0, 0], [1, 1], False),
    "resnet": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "dilated": ([2, 3], [1, 2], [1, 1], [2, 2], False),
    "ceil": ([3, 3], [2, 2], [0, 0], [1, 1], True),
    "gaps": ([2, 2], [3, 4], [1, 0], [1, 1], False),
    "overlapping": ([5, 4], [1, 1], [2, 1], [1, 1], False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_im2col(name: str, dtype: torch.dtype) -> None:
    """Every window a column, zeros around the image; with and without a batch."""
    x = sample(2, 3, 8, 9, dtype=dtype)
    check(lambda a: aten.im2col.default(a, *CASES[name]), x)
    check(lambda a: aten.im2col.default(a, *CASES[name]), x[0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_col2im(name: str, dtype: torch.dtype) -> None:
    """Overlapping windows add up; pixels in none are zero."""
    columns = aten.im2col.default(sample(2, 3, 8, 9), *CASES[name])
    x = sample(*columns.shape, dtype=dtype, seed=1)
    check(lambda a: aten.col2im.default(a, [8, 9], *CASES[name]), x)
    check(lambda a: aten.col2im.default(a, [8, 9], *CASES[name]), x[0])


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_max_pool_backward(name: str, dtype: torch.dtype) -> None:
    """A pixel receives the gradients of all windows whose maximum it was, the first of equals only."""
    x = sample(2, 3, 8, 9, dtype=dtype).round()  # equals occur
    values, positions = aten.max_pool2d_with_indices.default(x, *POOLS[name])
    grad = sample(*values.shape, dtype=dtype, seed=2)

    def backward(g: torch.Tensor, a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return aten.max_pool2d_with_indices_backward.default(g, a, *POOLS[name], p)

    check(backward, grad, x, positions)
    check(backward, grad[0], x[0], positions[0])


@pytest.mark.parametrize(("name", "taken"), [("plain", True), ("resnet", False)])
def test_large_overlapping_pools_are_left_to_eager(name: str, taken: bool) -> None:
    """The gradient of a large pooling is taken where each pixel lies in one window."""
    x = sample(4, 32, 32, 32)
    values, positions = aten.max_pool2d_with_indices.default(x, *POOLS[name])

    def backward(g: torch.Tensor, a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return aten.max_pool2d_with_indices_backward.default(g, a, *POOLS[name], p)

    graph = trace(backward, (values, x, positions)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default)
    assert bool(supports(node)) == taken


def test_max_pool_backward_in_three_dimensions() -> None:
    """Three spatial dimensions."""
    x = sample(1, 2, 4, 5, 6)
    arguments = ([2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 1], False)
    values, positions = aten.max_pool3d_with_indices.default(x, *arguments)
    check(
        lambda g, a, p: aten.max_pool3d_with_indices_backward.default(g, a, *arguments, p),
        torch.ones_like(values),
        x,
        positions,
    )


# kernel, stride, padding, ceil_mode, count_include_pad, divisor
AVERAGES = {
    "plain": ([2, 2], [], [0, 0], False, True, None),
    "padded": ([3, 3], [2, 2], [1, 1], False, True, None),
    "padding not counted": ([3, 3], [2, 2], [1, 1], False, False, None),
    "ceil": ([3, 2], [2, 3], [1, 1], True, True, None),
    "ceil, not counted": ([3, 2], [2, 3], [1, 1], True, False, None),
    "divisor": ([3, 2], [2, 2], [1, 0], True, True, 5),
    "gaps": ([2, 2], [3, 4], [0, 0], False, True, None),
    "larger than the image": ([20, 30], [], [0, 0], True, True, None),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average_pool_backward(name: str, dtype: torch.dtype) -> None:
    """Every rule of what a window's gradient is divided by."""
    x = sample(2, 3, 8, 9, dtype=dtype)
    grad = sample(*aten.avg_pool2d.default(x, *AVERAGES[name]).shape, dtype=dtype, seed=2)
    check(lambda g, a: aten.avg_pool2d_backward.default(g, a, *AVERAGES[name]), grad, x)
    check(lambda g, a: aten.avg_pool2d_backward.default(g, a, *AVERAGES[name]), grad[0], x[0])


def test_average_pool_backward_in_three_dimensions() -> None:
    """Three spatial dimensions."""
    x = sample(1, 2, 4, 5, 6)
    arguments = ([2, 3, 2], [1, 2, 2], [1, 1, 0], False, False, None)
    grad = sample(*aten.avg_pool3d.default(x, *arguments).shape)
    check(lambda g, a: aten.avg_pool3d_backward.default(g, a, *arguments), grad, x)
