"""Layouts of a region's buffers: channels innermost around convolutions that tensor cores compute, row by row elsewhere.

Inputs and outputs lie as the graph says. Inside, what such convolutions read and write has the strides of PyTorch's channels_last, and so does
everything of the same rank computed from it, until something of another rank (a classifier) reads it. Nothing is copied between them.
Source: the layout of tensor cores in NVIDIA's "Convolutional Layers User's Guide", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_hybrid_backend.codegen.backend import row_major
from torch_hybrid_backend.engines.triton.aten import dense_strides, wants_channels_last
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, compute_dtype
from torch_hybrid_backend.loops.layout import Layout, Strided


def channels_last_layouts(
    groups: Sequence[Group], fixed: Mapping[Buffer, Layout], target: Target
) -> Mapping[Buffer, Layout]:
    """The layout of every buffer that the groups read or write; `fixed` holds inputs and outputs."""
    layouts = dict(row_major(groups, fixed))
    convolutions = [m.op for g in groups for m in g.members if isinstance(m.op, ConvOp) and _wants(m.op, target)]
    convolved = {buffer for op in convolutions if isinstance(buffer := op.x, Buffer)}
    made = {op.out for op in convolutions}
    last: set[Buffer] = set()
    for group in groups:
        read = [buffer for buffer in group.reads() if buffer in last]
        is_made = group.members[0].op.out in made
        for member in group.members:
            buffer = member.op.out
            if len(buffer.shape) != 4 or buffer in fixed:
                continue
            if buffer in convolved or (is_made and buffer.shape == group.shape) or _keeps_channels(buffer, read):
                last.add(buffer)
                layouts[buffer] = Strided(dense_strides(buffer.shape, (0, 2, 3, 1)))
    return layouts


def _wants(op: ConvOp, target: Target) -> bool:
    dtypes = {op.x.dtype, op.w.dtype}
    dtype = dtypes.pop() if len(dtypes) == 1 else compute_dtype(op.x.dtype)
    return wants_channels_last(dtype, op.groups, len(op.x.shape) - 2, target)


def _keeps_channels(buffer: Buffer, read: Sequence[Buffer]) -> bool:
    """True if dimension 1 of the buffer is the channels of one of those it is computed from: their number or that of the pixels is the same."""
    return any(other.shape[1] == buffer.shape[1] or other.shape[2:] == buffer.shape[2:] for other in read)
