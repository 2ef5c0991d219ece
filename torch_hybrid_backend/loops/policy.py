"""Abilities of an engine's kernels beyond the common ones, and its limits of inlining and fusion."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities that only some backends' kernels have. A lowering asks for them, and refuses without.

    `float8`: tensors may hold float8_e4m3fn and float8_e5m2.
    `scans`: kernels for `loops.ir.ScanOp`; elsewhere each element of a running sum reduces all before it, and long ones are refused.
    `scatters`: whether many points may write to one element (`loops.ir.ScatterOp`): "none"; "any", in the order of the domain, or, by atomic
    operations, in whatever order; "ordered", only where every order has the same result.
    `max_gathered`: pixels up to which each is asked about all windows that cover
    it, for the gradient of a maximum pooling. `max_taps`: neighbours that an interpolation may read for one pixel.
    `any_convolution`: convolutions of volumes, and transposed ones whose windows do not tile the result.
    `open_images`: convolutions of images whose height or width is only known at run time.
    `attention_gradients`: attention writes its log-sum-exp where that is read, and its gradients are kernels.
    `joined_moments`: a mean and the squared deviations from it are found in one reading of a row, where a correction would take a second one.
    `integer_products`: products of quantized operands are products of integers (`loops.ir.IntegerMatMulOp`, `IntegerConvOp`),
    and a constant right operand of a matrix product that is dequantized, or from a codebook, is read as the expression that it is. So are
    dequantized queries, keys and values of attention.
    `segments`: kernels for `loops.ir.SegmentOp`.
    `recurrent`: kernels for `loops.ir.RecurrentOp`.
    `flags`: kernels tell of values that PyTorch's operators refuse (`loops.lowering.Context.refuse`), and the call ends after them.
    `random_blocks`: for kernels that draw random numbers (`loops.random_numbers`), how many blocks of 256 threads PyTorch's own have at most; 0
    where there are none.
    """

    float8: bool = False
    scans: bool = False
    scatters: str = "none"
    # Asking is 13 cycles a pixel on a CPU, against 3 for eager, which visits each window once (3x3 windows, stride 2, of 32 x 64 x 32 x 32).
    max_gathered: int = 65_536
    max_taps: int = 8
    any_convolution: bool = False
    open_images: bool = False
    attention_gradients: bool = False
    joined_moments: bool = False
    integer_products: bool = False
    segments: bool = False
    recurrent: bool = False
    flags: bool = False
    random_blocks: int = 0


COMMON = Abilities()  # what the kernels of every backend can do


@dataclass(frozen=True, slots=True)
class FusionPolicy:
    """Limits of fusion. None of them changes a result but by rounding.

    `copies_columns`: a matrix product's left operand is copied where it does not lie along k; else it is read in any order of memory.
    `max_inline_calls`, `max_inline_loads`: scalar operations and loads of a value that is computed where it is read; a longer one gets memory.
    `max_depth`: scalar operations one after another in a kernel, and values computed where they are read one upon another. So many hide a pass
    over memory, and what walks expressions recurses: here, in pickling, and in compilers, where the end of the stack is a crash.
    `max_members`, `max_reads`: operations of a group, and buffers it reads from outside.
    `min_rows`, `small_elements`: what is computed around a reduction joins it, row by row, where its domain has so many rows, or no more
    elements than that.
    `channel_block`: a convolution reads some channels of what another one writes in place where they begin at a multiple of it; else they are
    copied.
    `gathers_in_attention`: attention reads keys and values where an index says, and computes its mask as it needs it, though others need the
    same one. `skips_keys`: of one query, attention computes a mask that tells the last visible key, and leaves out the keys behind it.
    `updates_in_attention`: it reads a cache of keys or values and what is new in it (`loops.cache_updates`), not a copy of both.
    `abilities`: what the kernels can do.
    """

    copies_columns: bool = field(default=True, kw_only=True)
    max_depth: int = field(default=64, kw_only=True)
    max_inline_calls: int
    max_inline_loads: int
    max_members: int
    max_reads: int
    min_rows: int
    small_elements: int
    channel_block: int
    gathers_in_attention: bool = False
    skips_keys: bool = False
    updates_in_attention: bool = False
    abilities: Abilities = COMMON
