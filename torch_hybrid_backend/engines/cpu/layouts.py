"""Layouts of a region's buffers.

Inputs and outputs lie as the graph says. Inside, what convolutions write stays in blocked channels (NCHW16c), and so does everything of
the same rank computed from it, until something of another rank (a matmul over tokens, a classifier) reads it; the rest is row-major.
Source: NeoCPU (Liu et al., USENIX ATC 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_hybrid_backend.engines.cpu.operations import CpuConvOp
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import output_block
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, buffers_of
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous
from torch_hybrid_backend.sizes.size import Size


def blocked_layouts(groups: Sequence[Group], fixed: Mapping[Buffer, Layout], target: Target) -> dict[Buffer, Layout]:
    """The layout of every buffer the groups read or write; `fixed` holds inputs, outputs and packed operands."""
    layouts = dict(fixed)
    convolved = {b for g in groups for m in g.members if isinstance(m.op, ConvOp) for b in buffers_of(m.op.x)}
    # What is read word by word needs blocks of whole words, however few channels a group of the convolution before it has.
    words = {
        op.x: min(op.weight.dot.group, target.lanes)  # a word of 64 bits has bytes of two blocks
        for op in (m.op for g in groups for m in g.members)
        if isinstance(op, CpuConvOp) and isinstance(op.weight, Panels) and op.weight.dot and isinstance(op.x, Buffer)
    }
    for group in groups:
        layouts.update((b, contiguous(b.shape)) for b in group.besides if b not in layouts)
        blocked = [b for b in group.reads() if isinstance(layouts.get(b), Blocked)]
        for member in group.members:
            buffer = member.op.out
            if buffer in layouts:
                continue
            layouts[buffer] = contiguous(buffer.shape)
            if len(buffer.shape) not in (3, 4) or buffer.shape[1] == 1 or isinstance(buffer.shape[1], Size):
                continue
            anchor = group.members[0].op
            block = anchor.weight.width if isinstance(anchor, CpuConvOp) and buffer.shape == group.shape else 0
            if block and block % words.get(buffer, 1) == 0:
                layouts[buffer] = Blocked(block)
            elif _keeps_channels(buffer, blocked) or buffer in convolved:
                layouts[buffer] = Blocked(output_block(buffer.shape[1], 1, target))
    return layouts


def _keeps_channels(buffer: Buffer, blocked: Sequence[Buffer]) -> bool:
    """True if dimension 1 of a 4-D buffer is the channels of one of the blocked tensors it is computed from.

    It is where the channels or the pixels are as many; a transposed copy (NHWC, for a layer norm or a matmul over channels) has neither.
    """
    same = (b.shape[1] == buffer.shape[1] or b.shape[2:] == buffer.shape[2:] for b in blocked if len(b.shape) == 4)
    return len(buffer.shape) == 4 and any(same)
