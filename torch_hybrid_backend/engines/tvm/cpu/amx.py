"""Products on AMX's tiles in place of kernels that multiply by vectors, where the processor has them and this process may use them.

Enters: a kernel of a product with a constant right operand. Leaves: the kernel that does the same with tiles, and the operand packed for it.
float32 is multiplied as three bfloat16, or as two where `torch.set_float32_matmul_precision` allows less than float32's own precision:
`amx_formats` says what that costs. bfloat16 is multiplied as it is, a denormal number as 0, as PyTorch's own kernels for AMX do. 8-bit integers
are multiplied exactly. Illegal: sizes known only at run time.

Nothing here imports TVM.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS, PANEL, TileFormat
from torch_hybrid_backend.engines.tvm.cpu.kernels import PackedMatMulKernel, TileMatMulKernel, UnpackedMatMulKernel
from torch_hybrid_backend.engines.tvm.cpu.operands import packed_unpacked
from torch_hybrid_backend.engines.tvm.cpu.packing import pack_tiles
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load
from torch_hybrid_backend.loops.kernels import Argument, kernel_sizes
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.machine import float32_precision
from torch_hybrid_backend.sizes.size import known_int

# Products of fewer rows take as long as their weight takes to come from memory, and tiles are mostly empty.
_MIN_ROWS = 8
# Multiply-adds a cycle that kernels by vectors reach, of float32 (which bfloat16 is widened to) and of 8-bit integers, and the share of their
# cycles in which tiles multiply: 2-core Granite Rapids, 128 to 1,024 rows.
_VECTOR_RATE, _INTEGER_RATE, _TILE_SHARE = 25.0, 100.0, 0.65
# By estimate tiles are taken where they are so much faster, and tried where they might be.
_CERTAIN_COST, _CONCEIVABLE_COST = 0.8, 1.25
_RANKS = 4


def tile_products(
    kernel: PackedMatMulKernel | UnpackedMatMulKernel, weight: Packed | None, target: Target
) -> list[Variant]:
    """The product on tiles, and the further choices of its schedule; none where it has no such form."""
    operand = kernel.packed if isinstance(kernel, PackedMatMulKernel) else kernel.weight
    name = _format(kernel.a, operand.dtype, kernel.accumulator.dtype, target)
    if name is None or kernel_sizes(kernel):
        return []
    batch, m, n, k = (known_int(variable.extent) for variable in (*kernel.domain, kernel.k))
    if m < _MIN_ROWS or not (batch and n and k):
        return []
    form, cost = FORMATS[name], _cost(m, n, k, FORMATS[name])
    if cost > _CONCEIVABLE_COST:
        return []
    batched = isinstance(kernel, PackedMatMulKernel) and kernel.batched_b
    buffer = Buffer(form.packed_shape(batch if batched else 1, k, n), form.dtype, "tiles", constant=True)
    ahead = partial(pack_tiles, form=form)
    if isinstance(kernel, UnpackedMatMulKernel):
        packed = packed_unpacked(kernel, buffer, ahead)
    elif weight is not None:
        packed = weight.repacked(buffer, ahead)
    else:
        return []
    argument = Argument(buffer, contiguous(buffer.shape))
    reads = tuple(argument if read.buffer is operand else read for read in kernel.reads)
    product = TileMatMulKernel(
        reads,
        kernel.writes,
        kernel.domain,
        kernel.k,
        kernel.a,
        buffer,
        name,
        batched,
        kernel.accumulator,
        kernel.stores,
    )
    first = Variant(f"amx {name}", (product,), (packed,), not form.splits, cost < _CERTAIN_COST, cost)
    others = [
        Variant(
            f"amx {name} choice {n}",
            (dataclasses.replace(product, schedule_rank=n),),
            (packed,),
            not form.splits,
            cost=cost,
        )
        for n in range(1, _RANKS)
    ]
    return [first, *others]


def _format(a: Expr, dtype: str, sums: str, target: Target) -> str | None:
    """The format's name for an operand `a` and one of `dtype`; None where the processor has no tiles for them."""
    bfloat16, int8 = ({"amx_tile", name} <= set(target.features) for name in ("amx_bf16", "amx_int8"))
    if dtype == a.dtype == sums == "float32" and bfloat16:
        matmul, _ = float32_precision("cpu")
        return "float32" if matmul in ("none", "ieee") else "float32 high"
    if dtype == "bfloat16" and a.dtype == "float32" and bfloat16:
        return "bfloat16"  # operands of a product have one dtype: `a` is of bfloat16, widened
    if dtype == "int8" and sums == "int32" and int8:
        source = a.args[0] if isinstance(a, Call) and a.op == "cast" else a
        if isinstance(source, Load) and source.buffer.dtype in ("int8", "uint8"):
            return source.buffer.dtype
    return None


def _cost(m: int, n: int, k: int, form: TileFormat) -> float:
    """The estimated time on tiles over that by vectors."""
    tiles = -(-m // 16) * 2 * -(-n // PANEL) * form.steps(k)
    multiplied = tiles * form.products * 16 / _TILE_SHARE
    copied = m * k * form.copy_cycles
    by_vectors = m * n * k / (_INTEGER_RATE if form.itemsize == 1 else _VECTOR_RATE)
    return (multiplied + copied) / by_vectors
