"""Operands of products by dot products (`dot_products.py`): of bfloat16, and of integers of 8 bits.

Right operands are packed in words. Left ones are read where they lie, if words do so there: along k of a matrix, along blocked channels of an
image; else a copy is, which joins the kernel that computes them where it can.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial

import torch

from torch_hybrid_backend.codegen.operands import OperandPacker, StridedView, strided_view
from torch_hybrid_backend.engines.cpu.dot_products import (
    MULTIPLICATION,
    DotProduct,
    bf16_dot_product,
    integer_dot_product,
)
from torch_hybrid_backend.engines.cpu.operands.packing import is_depthwise, pack_conv_weight, packed_conv_weight_value
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import (
    channel_sums,
    column_sums,
    constant_words,
    image_words,
    left_words,
    pack_conv_words,
    pack_right,
    pack_taps,
    packed_conv_words_value,
    packed_right_value,
    tap_words_shape,
)
from torch_hybrid_backend.engines.cpu.operations import CpuMatMulOp, convolution_with
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import output_block, tile_n
from torch_hybrid_backend.engines.cpu.weights import Panels, Taps
from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Const,
    ConvOp,
    Expr,
    IntegerConvOp,
    IntegerMatMulOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    domain_vars,
)
from torch_hybrid_backend.loops.layout import Layout, Strided
from torch_hybrid_backend.sizes.size import Dim, known_int, product

# Products along fewer elements are not worth words.
_LEAST_DEPTH = 16
# Of output channels: the shortest vectors that dot products have.
_LEAST_BLOCK = 4
# Channels of a word where pairs of pixels are multiplied.
_PAIRED_BYTES = 8
# Of a line: of more, a register tile would be too narrow to be worth words.
_MOST_TAPS = 8
# float32 holds every whole number up to here.
_EXACT = 1 << 24


class DotProductOperands:
    """Adds products to `packer`. `layouts`: how inputs, outputs and literals lie; `images`: the buffers that convolutions read."""

    def __init__(
        self, packer: OperandPacker, layouts: Mapping[Buffer, Layout], images: Collection[Buffer], target: Target
    ) -> None:
        self._packer, self._layouts, self._target = packer, layouts, target
        self._images = images
        self._copies: dict[tuple[object, ...], Buffer] = {}

    def takes_matmul(self, op: MatMulOp) -> bool:
        """Adds a product of bfloat16, where the processor has dot products for it; whether it did."""
        m, k, n = op.a.shape[1], op.a.shape[2], op.out.shape[2]
        dot = bf16_dot_product(self._target, m, k)
        if dot is None or not op.a.dtype == op.b.dtype == "bfloat16":
            return False
        # Without padding: other ways of computing the kernel read its left operand too.
        if (
            not isinstance(k, int)
            or k < _LEAST_DEPTH
            or k % dot.group
            or (isinstance(n, int) and n < self._target.lanes)
        ):
            return False
        b, tile = self._right(op.b, dot, n)
        panels = Panels(buffer=b, width=tile, dot=dot)
        self._packer.add(CpuMatMulOp(op.out, self._left(op.a, dot), op.b, weight=panels))
        return True

    def add_integer_matmul(self, op: IntegerMatMulOp) -> None:
        """Adds a product of integers: by dot products where the processor has them, else as one of int32.

        What moves the left operand, its zero point and what the instruction needs, is taken off as that much of the sums of columns: where
        they start if they and it are known ahead, else behind.
        """
        packer, weight = self._packer, strided_view(op.b)
        is_known = weight is not None and weight.is_constant
        bounds = None if weight is None else weight.bounds
        of_bytes = integer_dot_product(
            op.a.dtype, op.b.dtype, self._target, knows_sums=True, bounds=bounds, rows=op.a.shape[1]
        )
        dot = of_bytes or MULTIPLICATION
        packed, tile = self._right(op.b, dot, op.out.shape[2])
        form = packed.shape[0], packed.shape[1] * tile

        def column_sums_times(factor: int) -> Buffer:
            assert weight is not None
            return packer.made_ahead(weight, partial(column_sums, width=tile, factor=factor), Buffer(form, "int32"))

        moved, dtype = dot.shift, op.out.dtype
        zero = None if op.zero is None else op.zero(domain_vars(op.out.shape[:2]))
        if is_known and isinstance(zero, Const) and dtype == "int32":
            moved, zero = moved + int(zero.value), None
        start = column_sums_times(-moved) if moved and is_known else None
        behind = 0 if is_known else moved
        is_corrected = zero is not None or behind != 0
        sums = Buffer(op.out.shape, "int32", "sums") if is_corrected else op.out
        panels = Panels(buffer=packed, width=tile, dot=dot, start=start)
        packer.add(CpuMatMulOp(sums, self._left(op.a, dot), op.b, weight=panels))
        if not is_corrected:
            return
        columns = column_sums_times(1) if is_known else self._column_sums(op.b)
        one_matrix = packed.shape[0] == 1

        def corrected(index: tuple[Index, ...]) -> Expr:
            batch, row, column = index
            of_column = scalar.cast(columns.at((as_index(0) if one_matrix else batch, column)), dtype)
            of_row = scalar.const(behind, dtype)
            if op.zero is not None:
                of_row = scalar.add(scalar.cast(op.zero((batch, row)), dtype), of_row)
            return scalar.sub(scalar.cast(sums.at(index), dtype), scalar.mul(of_row, of_column))

        packer.add(MapOp(op.out, Map(op.out.shape, dtype, corrected, ((sums, lambda index: index),))))

    def _column_sums(self, b: Value) -> Buffer:
        """The sums of an operand's columns, computed in every call."""
        columns = Buffer((b.shape[0], b.shape[2]), "int32", "column sums")

        def element(index: tuple[Index, ...]) -> Expr:
            return scalar.cast(b.at(index), "int32")

        self._packer.add(ReduceOp(columns, b.shape, (1,), "sum", element))
        return columns

    def _right(self, b: Value, dot: DotProduct, n: Dim) -> tuple[Buffer, int]:
        """A product's right operand in words, and the width of its panels: whole vectors."""
        tile = max(tile_n(n, self._target, dot.rows), self._target.lanes)
        ahead, each_call = partial(pack_right, tile_n=tile, dot=dot), partial(packed_right_value, tile_n=tile, dot=dot)
        return self._packer.pack(b, ahead, each_call, ("b", tile, dot)), tile

    def _left(self, a: Value, dot: DotProduct) -> Value:
        """The left operand that is read word by word: itself where its words lie together, else a copy."""
        view = strided_view(a)
        if view is not None and view.buffer in self._layouts:
            own = self._layouts[view.buffer]
            view = strided_view(a, own) if isinstance(own, Strided) else None
        is_there = view is not None and view.bounds is None and view.buffer not in self._images
        if view is not None and is_there and a.dtype == dot.left and view.strides[2] == 1:
            places = (a.shape[2], view.offset, *view.strides[:2])
            if all(isinstance(place, int) and place % dot.group == 0 for place in places):
                if view.buffer not in self._layouts:
                    self._packer.keep_row_major(view.buffer)
                return a
        return self._packer.pack(a, partial(constant_words, dot=dot), partial(left_words, dot=dot), ("a", dot))

    def takes_convolution(self, op: ConvOp) -> bool:
        """Adds a convolution of bfloat16, where the processor has dot products for it; whether it did."""
        dot = bf16_dot_product(self._target, self._paired_pixels(op), known_int(op.w.shape[1]))
        if dot is None or not op.x.dtype == op.w.dtype == "bfloat16" or not _has_words(op, dot):
            return False
        block = output_block(known_int(op.out.shape[1]), op.groups, self._target)
        if block != self._target.lanes or known_int(op.w.shape[1]) % dot.group:
            return False
        self._add_convolution(op, self._image(op, dot), dot, block)
        return True

    def add_integer_convolution(self, op: IntegerConvOp) -> None:
        """Adds a convolution of integers: by dot products where the processor has them for its channels, else of numbers that hold its sums.

        What moves the input is taken off where sums start. Then what counts as nothing around the image is what the zero point is moved to.
        """
        outputs = known_int(op.out.shape[1])
        block = output_block(outputs, op.groups, self._target)
        weight = strided_view(op.w)
        is_known = weight is not None and weight.is_constant
        bounds = None if weight is None else weight.bounds
        pixels = 1 if known_int(op.w.shape[1]) % _PAIRED_BYTES else self._paired_pixels(op)
        dot = integer_dot_product(op.x.dtype, op.w.dtype, self._target, knows_sums=is_known, bounds=bounds, rows=pixels)
        moved = op.zero + (0 if dot is None else dot.shift)
        if weight is not None and is_known and self._has_tap_words(op, block):
            self._add_taps(op, weight, block, moved)
            return
        if dot is None or block < _LEAST_BLOCK or not _has_words(op, dot) or (moved and not is_known):
            self._add_wide_convolution(op, block)
            return
        start = None
        if moved:
            assert weight is not None
            start = self._channel_sums(weight, op.groups, outputs, block, -moved)
        self._add_convolution(op, self._image(op, dot), dot, block, start, moved)

    def _paired_pixels(self, op: ConvOp) -> int:
        """The pixels of an image if neighbours may be multiplied together (`schedules/convolution/pixel_pairs.py`), else 1."""
        outputs, _, *kernel = map(known_int, op.w.shape)
        is_pointwise = op.groups == 1 and {*kernel, *op.stride} == {1} and not any(op.padding)
        if not is_pointwise or output_block(outputs, 1, self._target) != self._target.lanes:
            return 1
        pixels = product(op.out.shape[2:])
        return pixels if isinstance(pixels, int) else 1

    def _channel_sums(self, weight: StridedView, groups: int, outputs: int, block: int, factor: int) -> Buffer:
        """The first values of the sums of `outputs` channels: `factor` times the sums of their weights, each group padded to whole blocks."""
        like = Buffer((groups * -(-outputs // groups // block) * block,), "int32")
        return self._packer.made_ahead(weight, partial(channel_sums, groups=groups, block=block, factor=factor), like)

    def _add_taps(self, op: IntegerConvOp, weight: StridedView, block: int, moved: int) -> None:
        """A depthwise convolution in words of taps; `moved`, by how much pixels are too large, is taken off where sums start."""
        outputs, *_ = shape = tuple(map(known_int, op.w.shape))
        packed = Buffer(tap_words_shape(shape, block), "int8", "taps")
        w = self._packer.made_ahead(weight, partial(pack_taps, block=block), packed)
        # The channels are those of one group: blocks of the weight have neighbouring channels.
        start = self._channel_sums(weight, 1, outputs, block, -moved) if moved else None
        self._packer.add(convolution_with(op, Taps(buffer=w, width=block, start=start), border=op.zero))

    def _has_tap_words(self, op: IntegerConvOp, block: int) -> bool:
        """True if a depthwise convolution is computed in words of neighbouring taps (`schedules/convolution/depthwise_vnni.py`)."""
        x, inputs = op.x, known_int(op.w.shape[1])
        return (
            is_depthwise(known_int(op.out.shape[1]), inputs, op.groups)
            and isinstance(x, Buffer)
            and x not in self._layouts
            and x.dtype in ("uint8", "int8")
            and op.w.dtype == "int8"
            and block == self._target.lanes
            and self._target.isa.multiplies_taps
            and op.dilation[-1] == 1
            and known_int(op.w.shape[-1]) <= _MOST_TAPS
        )

    def _image(self, op: ConvOp, dot: DotProduct) -> Buffer:
        """The image that a convolution reads word by word: its input where that lies in whole words of channels, else a copy."""
        x = op.x
        missing = -known_int(x.shape[1]) % dot.group
        is_there = isinstance(x, Buffer) and x not in self._layouts and x.dtype == dot.left and not dot.shift
        if is_there and not missing:
            assert isinstance(x, Buffer)
            return x
        key = (x, dot)
        if key not in self._copies:
            value = image_words(x, dot)
            self._copies[key] = Buffer(value.shape, value.dtype, "words")
            self._packer.add(MapOp(self._copies[key], value))
        return self._copies[key]

    def _add_convolution(
        self, op: ConvOp, x: Buffer, dot: DotProduct, block: int, start: Buffer | None = None, border: int = 0
    ) -> None:
        ahead = partial(pack_conv_words, groups=op.groups, block=block, dot=dot)
        each_call = partial(packed_conv_words_value, groups=op.groups, block=block, dot=dot)
        w = self._packer.pack(op.w, ahead, each_call, ("w", block, op.groups, dot))
        panels = Panels(buffer=w, width=block, dot=dot, start=start)
        self._packer.add(convolution_with(op, panels, x=x, border=border))

    def _add_wide_convolution(self, op: IntegerConvOp, block: int) -> None:
        """The same sums in float32, where it holds them exactly, or in int32."""
        depth = math.prod(map(known_int, op.w.shape[1:]))
        dtype = "float32" if depth * 255 * 255 <= _EXACT else "int32"

        def x(index: tuple[Index, ...]) -> Expr:
            return scalar.sub(scalar.cast(op.x.at(index), dtype), scalar.const(op.zero, dtype))

        def wide_weight(w: Value) -> Map:
            return Map(w.shape, dtype, lambda index: scalar.cast(w.at(index), dtype))

        def ahead(w: torch.Tensor) -> torch.Tensor:
            return pack_conv_weight(w.to(getattr(torch, dtype)), op.groups, block)

        w = self._packer.pack(
            op.w,
            ahead,
            lambda w: packed_conv_weight_value(wide_weight(w), op.groups, block),
            ("w", block, op.groups, dtype),
        )
        sums = Buffer(op.out.shape, dtype, "sums")
        wide: Value = Map(op.x.shape, dtype, x, ((op.x, lambda index: index),))
        if not is_depthwise(known_int(op.out.shape[1]), known_int(op.w.shape[1]), op.groups):
            # In memory: other convolutions read an element for several outputs, and would convert it for each.
            copy = Buffer(op.x.shape, dtype, "wide")
            self._packer.add(MapOp(copy, wide))
            wide = copy
        self._packer.add(convolution_with(op, Panels(buffer=w, width=block), out=sums, x=wide))
        value = Map(op.out.shape, "int32", lambda i: scalar.cast(sums.at(i), "int32"), ((sums, lambda index: index),))
        self._packer.add(MapOp(op.out, value))


def _has_words(op: ConvOp, dot: DotProduct) -> bool:
    """True if the channels of a convolution are worth words: those of each group whole ones, unless there is one group, which is padded."""
    outputs, inputs = known_int(op.out.shape[1]), known_int(op.w.shape[1])
    if is_depthwise(outputs, inputs, op.groups):
        return False
    return inputs % dot.group == 0 if op.groups > 1 else 2 * inputs > dot.group
