"""Decompositions of operators for which torch_tensorrt has no converter, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


def _cast(x: Any, dtype: Any) -> Any:
    return aten._to_copy.default(x, dtype=dtype)


def _product(x: Any, y: Any) -> Any:
    """Compute a product of two bools by logical_and, as TensorRT does not multiply bools."""
    both = all(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in (x, y))
    return aten.logical_and.default(x, y) if both else NotImplemented


def _convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
    """Compute a transposed 1-d convolution in two dimensions: if its weight is an input of the engine, torch_tensorrt's converter loses x."""
    transposed, output_padding, groups = rest
    if not transposed or weight.dim() != 3:
        return NotImplemented
    sizes = [*stride, 1], [*padding, 0], [*dilation, 1], True, [*output_padding, 0], groups
    made = aten.convolution.default(x.unsqueeze(-1), weight.unsqueeze(-1), bias, *sizes)
    return made.squeeze(-1)


def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Compute a cumsum of integers or bools, exactly, by adding the elements 1, 2, 4, ... places before.

    TensorRT-RTX has no cumsum, and TensorRT's may not compute in 64 bits. Floats are left as they are: eager adds them in another order."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex) and dtype in (None, torch.int64)
    if not whole or x.dim() == 0:
        return NotImplemented
    total = x if x.dtype is torch.int64 else _cast(x, torch.int64)
    size, shift = x.shape[dim], 1
    first = aten.slice.Tensor(total, dim, 0, 1)
    zero = first - first
    while shift < _most(size):
        # Prepend `shift` zeros. No slice is empty then, even if a size known only at run time is below `shift`.
        shape = [-1] * x.dim()
        shape[dim] = shift
        zeros = zero if shift == 1 else aten.expand.default(zero, shape)
        total = total + aten.slice.Tensor(aten.cat.default([zeros, total], dim), dim, 0, size)
        shift *= 2
    return total


def _most(size: int | torch.SymInt) -> int:
    """Upper bound of a size. TensorRT's dimensions fit 32 bits."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return min(int(most), _LARGEST) if most.is_Integer else _LARGEST


_LARGEST = (1 << 31) - 1


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    """Compute an arange over sizes from arange(0, count) in int64, which has a converter of this package.

    torch_tensorrt's converter makes int32 numbers, and one too few if the last step is shorter than the others."""
    whole = all(isinstance(each, int | torch.SymInt) for each in (start, end)) and type(step) is int
    is_made = type(start) is int and (start, step) == (0, 1) and dtype is torch.int64
    if not whole or is_made or not any(isinstance(each, torch.SymInt) for each in (start, end)):
        return NotImplemented
    distance = end - start if step > 0 else start - end
    numbers = aten.arange.start_step(0, (distance + abs(step) - 1) // abs(step), 1, dtype=torch.int64)
    numbers = numbers if step == 1 else numbers * step
    numbers = numbers if type(start) is int and start == 0 else numbers + start
    return numbers if dtype in (None, torch.int64) else _cast(numbers, dtype)


def _broadcast(x: Any, shape: Any, dimensions: Any) -> Any:
    """Lower broadcast_in_dim to unsqueeze and expand. torch_tensorrt's converter needs static sizes, and only adds dimensions of size 1.
    Norms keep the dimensions that they reduce by this operator."""
    for position in range(len(shape)):
        if position not in dimensions:
            x = x.unsqueeze(position)
    same = all(statically_known_true(old == new) for old, new in zip(x.shape, shape, strict=True))
    return x if same else x.expand(shape)


def _select(x: Any, dim: int, index: Any) -> Any:
    """Replace a negative index, for which TensorRT defines no result, by the index from the start."""
    if type(index) is not int or index >= 0:
        return NotImplemented
    size = x.shape[dim]
    if isinstance(size, int):
        return aten.select.int(x, dim, size + index)
    return aten.select.int(aten.slice.Tensor(x, dim, size + index, size + index + 1), dim, 0)


def _index(x: Any, indices: Any) -> Any:
    """Replace negative indices by indices from the start. Only data tell which indices are negative."""
    given = [each for each in indices if each is not None]
    whole = all(each.dtype in (torch.int32, torch.int64) for each in given)  # a mask may index several dimensions
    if not whole or all(hasattr(each, _NON_NEGATIVE) for each in given):
        return NotImplemented
    places = [None if each is None else _from_start(each, x.shape[dim]) for dim, each in enumerate(indices)]
    return aten.index.Tensor(x, places)


def _from_start(index: Any, size: Any) -> Any:
    from_start = index + _cast(index < 0, index.dtype) * size
    setattr(from_start, _NON_NEGATIVE, True)  # the operator that `_index` calls is decomposed in turn
    return from_start


_NON_NEGATIVE = "_hybrid_is_non_negative"


# Added to torch_tensorrt's own.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    # PyTorch's decompositions and this package's casts yield it.
    torch.ops.prims.convert_element_type.default: _cast,
    torch.ops.prims.broadcast_in_dim.default: _broadcast,
    aten.mul.Tensor: _product,
    aten.convolution.default: _convolution,
    aten.cumsum.default: _cumsum,
    aten.arange.start_step: _arange,
    aten.select.int: _select,
    aten.index.Tensor: _index,
}

# Converters exist for the overload that export keeps: (x, sizes, align_corners, factors). AOTAutograd yields the other one.
_VEC_OVERLOADS: Mapping[Any, Any] = {
    aten.upsample_bicubic2d.default: aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.default: aten.upsample_bilinear2d.vec,
    aten.upsample_linear1d.default: aten.upsample_linear1d.vec,
    aten.upsample_trilinear3d.default: aten.upsample_trilinear3d.vec,
}


def use_vec_overloads(module: torch.fx.GraphModule) -> None:
    """Replace resize operators by the overloads that have converters, in place, if sizes alone determine the result."""
    for node in module.graph.nodes:
        if node.target in _VEC_OVERLOADS and _follows_sizes(node):
            node.target = _VEC_OVERLOADS[node.target]
            node.args = (*node.args[:3], None)
    module.recompile()


def _follows_sizes(node: Node) -> bool:
    """True if a node's scale factors equal the ratios of its sizes. Eager interpolates by the factors, converters by the sizes."""
    x, _, _, *factors = node.args
    if node.kwargs:
        return False
    before = x.meta["val"].shape[2:]  # type: ignore[union-attr]
    after = node.meta["val"].shape[2:]
    given = zip(before, after, factors, strict=False)
    return all(factor is None or statically_known_true(wide == narrow * factor) for narrow, wide, factor in given)
