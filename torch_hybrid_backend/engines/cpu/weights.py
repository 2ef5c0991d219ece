"""Forms of a weight: how kernels find a product's right operand, or a convolution's weight, in memory.

The form of its weight decides which schedule serves a kernel (`schedules/__init__.py`), and what profilers call it (`Weight.kind`).

    form                              schedule by vectors           on AMX's tiles
    Panels                            matmul/packed, convolution    `AmxTiles` from the same constant
    Panels with a `dot`               the same, VNNI                `AmxTiles` with `is_vnni`: the same buffer
    InPlace                           matmul/unpacked               `AmxTiles` from the same constant
    Quantized                         matmul/weight_only            `Quantized` with a `tile_format`: the same buffers
    Winograd, Taps                    convolution                   none
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, DotProduct
from torch_hybrid_backend.loops.ir import Buffer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Weight:
    """A weight in the kernel's argument `buffer`."""

    NAME: ClassVar[str] = "packed"

    buffer: Buffer

    @property
    def kind(self) -> str:
        """The form in a kernel's name."""
        return self.NAME

    @property
    def reads(self) -> list[Buffer]:
        """The arguments that a kernel reads of the weight, `buffer` first."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [value for value in values if isinstance(value, Buffer)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Panels(Weight):
    """Packed ahead in panels of `width` columns, zero-padded.

    A product's is (B or 1, ceil(N / width), K, width) (`packing.pack_b`). A convolution's columns are output channels, and a panel is a block
    of them (`packing.pack_conv_weight`).

    With a `dot`: K, or a group's channels, is in whole words, and a word's elements are innermost. The left operand is then one load of what
    lies together. Sums start at `start`, if there is one: (B or 1, N), or one number for each output channel, padded as in `buffer`.
    """

    width: int
    dot: DotProduct | None = None
    start: Buffer | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class InPlace(Weight):
    """Not packed: w[n, k] is element `offset + n * row_stride + k * k_stride` of `buffer`, float32. One of the strides is 1."""

    NAME: ClassVar[str] = "unpacked"

    offset: int
    row_stride: int
    k_stride: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Quantized(Weight):
    """Integers with scales: w[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n].

    The q of a panel of `width` columns lie in `buffer`, of `bits` bits each: `packing.pack_b`, or, where `buffer` is of int32, words along k
    (`packing.pack_bytes`, `packing.pack_nibbles`). `scales` are float32 or of a half type. `zeros` are float32, or None where all are 0. Both
    are (1, ceil(N / width), ceil(K / group), width). `group` is a multiple of 8 where there are several, and where `bits` is 4.

    With a `table` (a codebook), 16 values of float32, an integer of 4 bits stands for the value at its place, modulo 16. Scales are
    then 1, zeros None.

    `row_parts`: bytes of the left operand's numbers where they are multiplied as integers. One or two may be rounded to 8 or 16 bits. Few rows
    have three where many have two.

    `tile_format`: "" for vectors. On AMX's tiles "float32", "float32 high", or the format of the half type to which the left operand is rounded
    already. "bfloat16" rounds the dequantized weight, too; it is also the format where `row_parts` is 1. On tiles all sizes are known, and
    there is no table. Several groups are of whole steps of k, 32, but for "bfloat16".
    """

    bits: int
    scales: Buffer
    zeros: Buffer | None = None
    group: int
    width: int
    table: Buffer | None = None
    row_parts: int = ROW_PARTS
    tile_format: str = ""

    @property
    def kind(self) -> str:
        return "tile_dequantized" if self.tile_format else "dequantized"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AmxTiles(Weight):
    """Packed ahead for AMX's tiles, as `amx_formats.FORMATS[tile_format]` says (`packing.pack_tiles`, `packing.pack_conv_tiles`).

    `is_batched`: one matrix for each of a product's batch. `is_vnni`: `buffer` has the form of `Panels` with a `dot`, 32 columns wide, of whole
    steps of k. A convolution's is a matrix of (kernel, c) by o for each group. Sums of 8-bit integers are int32, modulo 2^32.
    """

    NAME: ClassVar[str] = "tile"

    tile_format: str
    is_batched: bool = False
    is_vnni: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Winograd(Weight):
    """A convolution's, transformed for tiles of `outputs` x `outputs` results (`packing.pack_winograd_weight`); `width`: lanes of a vector."""

    width: int
    outputs: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Taps(Weight):
    """A depthwise convolution's, 8-bit integers in words of neighbouring taps (`vnni_packing.pack_taps`), in blocks of `width` channels.

    Sums start at `start`, if there is one: one number for each output channel, padded as in `buffer`.
    """

    width: int
    start: Buffer | None = None
