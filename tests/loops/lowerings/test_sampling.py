"""Sampling of images and volumes at positions of a grid, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loops.check import check, sample
from loops.interpret import trace
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten
Operator = Callable[..., torch.Tensor]

# Shapes of an image or a volume, and of its grid; images of one row have nothing to interpolate between rows.
SHAPES = {
    "image": ((1, 3, 5, 7), (1, 4, 6, 2)),
    "row": ((1, 2, 1, 6), (1, 9, 3, 2)),
    "volume": ((2, 2, 4, 5, 6), (2, 3, 2, 4, 3)),
}


def _grid(shape: tuple[int, ...], dtype: torch.dtype, farthest: float) -> torch.Tensor:
    """Positions of which some lie outside, far outside, or nowhere, and some between two pixels."""
    grid = sample(*shape, dtype=dtype, seed=1).tanh() * 1.5
    flat = grid.view(-1)
    flat[:8] = torch.tensor([torch.nan, torch.inf, -torch.inf, farthest, -1.0, 1.0, 0.0, -0.0])
    return grid


def _sampled(operator: Operator, *arguments: object) -> Operator:
    return lambda x, grid: operator(x, grid, *arguments)


@pytest.mark.parametrize("padding", [0, 1, 2], ids=["zeros", "border", "reflection"])
@pytest.mark.parametrize("interpolation", [0, 1], ids=["bilinear", "nearest"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sampling(shape: str, interpolation: int, padding: int) -> None:
    """All kinds of padding, with corners aligned or not; what eager makes of NaN and of infinities too."""
    of_image, of_grid = SHAPES[shape]
    operator = aten.grid_sampler_3d.default if shape == "volume" else aten.grid_sampler_2d.default
    for dtype in (torch.float32, torch.float64):
        # So far out no digit of a reflected position is right.
        x, grid = sample(*of_image, dtype=dtype), _grid(of_grid, dtype, 30.0 if padding == 2 else 1e30)
        for aligned in (False, True):
            check(_sampled(operator, interpolation, padding, aligned), x, grid)


def test_an_infinity_beside_the_image_does_not_leak() -> None:
    """A pixel that is not read has no part in a result: infinity times a weight of 0 would be NaN."""
    x = sample(1, 1, 4, 4)
    x[0, 0, 0, 0] = torch.inf
    check(lambda a, g: aten.grid_sampler_2d.default(a, g, 0, 0, False), x, torch.full((1, 2, 2, 2), 1.2))


@pytest.mark.parametrize(
    ("interpolation", "batch", "dtype", "code"),
    [
        pytest.param(2, 1, torch.float32, Reason.LIBRARY, id="bicubic"),
        pytest.param(0, 2, torch.float32, Reason.LIBRARY, id="a-batch-of-images"),
        pytest.param(0, 1, torch.bfloat16, Reason.DTYPE, id="a-half-type"),
    ],
)
def test_what_is_refused(interpolation: int, batch: int, dtype: torch.dtype, code: Reason) -> None:
    """Refuse forms that PyTorch's operator computes as fast or faster, and half types, in which it rounds each step."""
    inputs = sample(batch, 1, 4, 4, dtype=dtype), sample(batch, 2, 2, 2, dtype=dtype)
    module = trace(_sampled(aten.grid_sampler_2d.default, interpolation, 0, False), inputs)
    (node,) = (node for node in module.graph.nodes if node.op == "call_function")
    verdict = supports(node)
    assert isinstance(verdict, Refused)
    assert verdict.code is code
