"""Our part of lowering: operators that torch_tensorrt has no converters for, or has some that are wrong, as others that it has."""

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
    """TensorRT multiplies no truth values."""
    both = all(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in (x, y))
    return aten.logical_and.default(x, y) if both else NotImplemented


def _convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
    """Their converter loses the input of a transposed one of one dimension where the weight is an input of the engine: it has two here."""
    transposed, output_padding, groups = rest
    if not transposed or weight.dim() != 3:
        return NotImplemented
    sizes = [*stride, 1], [*padding, 0], [*dilation, 1], True, [*output_padding, 0], groups
    made = aten.convolution.default(x.unsqueeze(-1), weight.unsqueeze(-1), bias, *sizes)
    return made.squeeze(-1)


def _running_sum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Compute a running sum of whole numbers and truth values by adding what lies 1, 2, 4, ... before: exact, by operators that are exact.
    TensorRT-RTX has no running sum, and TensorRT's is not known to be of 64 bits. Of floats the order of additions would be another than
    eager's."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex) and dtype in (None, torch.int64)
    if not whole or x.dim() == 0:
        return NotImplemented
    total = x if x.dtype is torch.int64 else _cast(x, torch.int64)
    size, shift = x.shape[dim], 1
    first = aten.slice.Tensor(total, dim, 0, 1)
    zero = first - first
    while shift < _most(size):
        # As many zeros before it: no part is without elements then, even where a size known only at run time is less than the shift.
        shape = [-1] * x.dim()
        shape[dim] = shift
        zeros = zero if shift == 1 else aten.expand.default(zero, shape)
        total = total + aten.slice.Tensor(aten.cat.default([zeros, total], dim), dim, 0, size)
        shift *= 2
    return total


def _most(size: int | torch.SymInt) -> int:
    """The most that a size can be: TensorRT has no dimension that takes more than 32 bits."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return min(int(most), _LARGEST) if most.is_Integer else _LARGEST


_LARGEST = (1 << 31) - 1


def _count(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **_: Any) -> Any:
    """Whole numbers as many as a size says: from 0, by 1, in 64 bits, as our converter makes them; then what is asked for. Theirs makes numbers
    of 32 bits, and one too few where the last step is cut short."""
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
    """Their converter only adds dimensions of size 1, and only where all sizes are known. Norms keep the dimensions that they reduce by it."""
    for position in range(len(shape)):
        if position not in dimensions:
            x = x.unsqueeze(position)
    same = all(statically_known_true(old == new) for old, new in zip(x.shape, shape, strict=True))
    return x if same else x.expand(shape)


def _select(x: Any, dim: int, index: Any) -> Any:
    """Counted from the end: their converter hands TensorRT an index below 0, which it does not define."""
    if type(index) is not int or index >= 0:
        return NotImplemented
    size = x.shape[dim]
    if isinstance(size, int):
        return aten.select.int(x, dim, size + index)
    return aten.select.int(aten.slice.Tensor(x, dim, size + index, size + index + 1), dim, 0)


def _index(x: Any, indices: Any) -> Any:
    """Likewise, where only data tell which indices are below 0: the size is added to those."""
    given = [each for each in indices if each is not None]
    whole = all(
        each.dtype in (torch.int32, torch.int64) for each in given
    )  # a mask may take the place of several dimensions
    if not whole or all(hasattr(each, _COUNTED) for each in given):
        return NotImplemented
    places = [None if each is None else _from_start(each, x.shape[dim]) for dim, each in enumerate(indices)]
    return aten.index.Tensor(x, places)


def _from_start(index: Any, size: Any) -> Any:
    counted = index + _cast(index < 0, index.dtype) * size
    setattr(counted, _COUNTED, True)  # what `_index` returns is decomposed in turn
    return counted


_COUNTED = "_hybrid_is_counted_from_the_start"


# Beside torch_tensorrt's own.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    # PyTorch's decompositions yield it, and our own casts are.
    torch.ops.prims.convert_element_type.default: _cast,
    torch.ops.prims.broadcast_in_dim.default: _broadcast,
    aten.mul.Tensor: _product,
    aten.convolution.default: _convolution,
    aten.cumsum.default: _running_sum,
    aten.arange.start_step: _count,
    aten.select.int: _select,
    aten.index.Tensor: _index,
}

# Converters know these by the overload that export keeps: (x, sizes, align_corners, factors). What AOTAutograd yields is the other.
_RESIZED: Mapping[Any, Any] = {
    aten.upsample_bicubic2d.default: aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.default: aten.upsample_bilinear2d.vec,
    aten.upsample_linear1d.default: aten.upsample_linear1d.vec,
    aten.upsample_trilinear3d.default: aten.upsample_trilinear3d.vec,
}


def name_resizes(module: torch.fx.GraphModule) -> None:
    """Call operators that resize by the overload that converters know, in place, where sizes alone say what they compute."""
    for node in module.graph.nodes:
        if node.target in _RESIZED and _follows_sizes(node):
            node.target = _RESIZED[node.target]
            node.args = (*node.args[:3], None)
    module.recompile()


def _follows_sizes(node: Node) -> bool:
    """True if the factors that a node is given, by which eager then finds where to read, are those of its sizes."""
    x, _, _, *factors = node.args
    if node.kwargs:
        return False
    before = x.meta["val"].shape[2:]  # type: ignore[union-attr]
    after = node.meta["val"].shape[2:]
    given = zip(before, after, factors, strict=False)
    return all(factor is None or statically_known_true(wide == narrow * factor) for narrow, wide, factor in given)
