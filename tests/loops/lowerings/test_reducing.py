"""Parts that reductions share: dimensions, shapes and statistics."""

from __future__ import annotations

import itertools

import pytest
import torch

from loops.interpret import Environment, evaluate, torch_dtype
from torch_hybrid_backend.loops.ir import Buffer, LoopOp, ReduceOp, Value
from torch_hybrid_backend.loops.lowering import Context
from torch_hybrid_backend.loops.lowerings.reducing import axes_of, extent, kept_shape, moments, reduced
from torch_hybrid_backend.loops.ops import mul
from torch_hybrid_backend.sizes.size import symbol

SUBSETS = [axes for count in range(4) for axes in itertools.combinations(range(3), count)]


class _Lowering:
    """Collects the operations that a value needs, and computes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ops: list[LoopOp] = []
        self.context = Context(self.ops.append)
        self.tensor = tensor
        self.x = Buffer(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def compute(self, *values: Value) -> list[torch.Tensor]:
        buffers = [self.context.materialize(value) for value in values]
        env: Environment = {self.x: self.tensor}
        for op in self.ops:
            evaluate(op, env)
        return [env[buffer] for buffer in buffers]


@pytest.mark.parametrize(
    ("dim", "rank", "axes"),
    [
        (None, 3, (0, 1, 2)),
        ([], 2, (0, 1)),
        (-1, 3, (2,)),
        ((2, 0), 3, (0, 2)),
        ((-1, 2, 0), 3, (0, 2)),
        (None, 0, ()),
        (0, 0, ()),
        ([-1], 0, ()),
    ],
)
def test_dimensions_are_named_in_every_way_that_eager_takes(dim: object, rank: int, axes: tuple[int, ...]) -> None:
    """Dimensions are one or several, from either end, in any order, and none for all; a tensor without dimensions has none to reduce."""
    assert axes_of(dim, rank) == axes  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", SUBSETS)
@pytest.mark.parametrize("keepdim", [False, True])
def test_shapes(axes: tuple[int, ...], keepdim: bool) -> None:
    """The result has eager's shape, and with what is reduced the shape accounts for every element; symbolic sizes are kept."""
    shape = (2, 3, 5)
    eager = torch.empty(shape).sum(axes, keepdim=keepdim) if axes else torch.empty(shape)
    assert kept_shape(shape, axes, keepdim) == tuple(eager.shape)
    assert extent(shape, axes) * eager.numel() == 30
    rows = symbol("s0")
    assert extent((rows, 3), (0, 1)) == rows * 3
    assert kept_shape((rows, 3), (1,), keepdim) == ((rows, 1) if keepdim else (rows,))


@pytest.mark.parametrize("axes", SUBSETS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_are_those_of_eager(axes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Mean and squared deviations keep their dimensions; of numbers far from zero nothing is lost, and half types sum in float32."""
    x = (torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0)) + 1000).to(dtype)
    lowering = _Lowering(x)
    mean, squares = lowering.compute(*moments(lowering.context, lowering.x, axes))
    wide = x.double()
    expected = wide.mean(axes, keepdim=True)
    assert mean.dtype == squares.dtype == torch.float32
    torch.testing.assert_close(mean, expected.float(), rtol=1e-6, atol=0)
    deviations = ((wide - expected) ** 2).sum(axes, keepdim=True)
    torch.testing.assert_close(squares, deviations.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("combiner", ["sum", "max", "argmax"])
def test_a_tensor_without_dimensions_is_its_own_reduction(combiner: str) -> None:
    """No loop is made for it: the value itself, or place 0."""
    x = torch.tensor(-3.5)
    lowering = _Lowering(x)
    dtype = "int64" if combiner == "argmax" else "float32"
    (found,) = lowering.compute(reduced(lowering.context, combiner, lowering.x, (), dtype=dtype))
    assert not any(isinstance(op, ReduceOp) for op in lowering.ops)
    torch.testing.assert_close(found, torch.tensor(0) if combiner == "argmax" else x)


@pytest.mark.parametrize(("keepdim", "dtype"), [(True, None), (False, "float64")])
def test_a_function_is_applied_before_reducing(keepdim: bool, dtype: str | None) -> None:
    """Sums of squares along any dimensions; the result is of the dtype that is asked for, else of the compute dtype."""
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    lowering = _Lowering(x)
    squares = reduced(lowering.context, "sum", lowering.x, (0, 2), lambda a: mul(a, a), dtype, keepdim)
    (found,) = lowering.compute(squares)
    assert found.dtype == torch_dtype(dtype or "float32")
    torch.testing.assert_close(found.float(), (x.float() ** 2).sum((0, 2), keepdim=keepdim))
