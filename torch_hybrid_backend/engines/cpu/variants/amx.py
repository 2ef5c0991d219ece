"""Products on AMX's tiles in place of kernels that multiply by vectors, where the processor has them and this process may use them.

Enters: a kernel of a product, or of a convolution with a constant weight. Leaves: the kernel that does the same with tiles, and the operand
packed for it. A right operand that is packed in every call is read as the kernel by vectors does, in words: of bfloat16 and of integers.
float32 is multiplied as three bfloat16, or as two where `torch.set_float32_matmul_precision` allows less than float32's own precision.
float16 is multiplied as it is where the processor does that, else as two bfloat16. `amx_formats` says what that costs. bfloat16 is multiplied
as it is, a denormal number as 0, as PyTorch's own kernels for AMX do. 8-bit integers are multiplied exactly. A weight of 8 or 4 bits by
which floats are multiplied stays as it is packed: its kernel unpacks it to bfloat16. How many rows, matrices or images there are may be known
only at run time, but not with such weights. Illegal: other sizes that are.

Nothing here imports TVM.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel, with_weight
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL, TileFormat
from torch_hybrid_backend.engines.cpu.operands.packed_operands import repacked
from torch_hybrid_backend.engines.cpu.operands.packing import pack_conv_tiles, pack_tiles
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, InPlace, Panels, Quantized, Taps, Weight
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.index import Index, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load, is_rounded
from torch_hybrid_backend.loops.kernels import Store, kernel_sizes
from torch_hybrid_backend.machine import EXACT_PRECISIONS, float32_precision
from torch_hybrid_backend.sizes.size import known_int, size_hint

# One row takes as long as its weight takes to come from memory, and tiles are mostly empty. So do the next few, but where the weight stays in
# the second-level cache: kernels by vectors are timed beside.
_MIN_ROWS, _SURE_ROWS = 2, 8
# To scale a tile of sums and add it to others.
_SCALE_CYCLES = 32.0
# Multiply-adds a cycle that kernels by vectors reach, of float32 (which bfloat16 is widened to) and of 8-bit integers, and the share of their
# cycles in which tiles multiply: 2-core Granite Rapids, 128 to 1,024 rows.
_VECTOR_RATE, _INTEGER_RATE, _TILE_SHARE = 25.0, 100.0, 0.65
# By estimate tiles are taken where they are so much faster, and tried where they might be.
_CERTAIN_COST, _CONCEIVABLE_COST = 0.8, 1.25
# No estimate for float32, and none for few rows, is below this: a kernel by vectors is timed beside the one on tiles (`codegen.search` times no
# variant whose estimate is 1.6 times another's). That for float32 was confirmed on one processor.
_LEAST_COST = 0.65
_RANKS = 4
# Vectors of a row that is copied together from few channels: their copies follow each other in the code.
_MOST_VECTORS = 256
# Channels are read in vectors of so many.
_LANES = 16


def tile_products(kernel: CpuMatMulKernel[Panels | InPlace], packed: Packed | None, target: Target) -> list[Variant]:
    """The product on tiles, and the further choices of its schedule; none where it has no such form."""
    weight, is_batched = kernel.weight, kernel.is_batched
    precision, _ = float32_precision("cpu")
    name = _format(kernel.a, weight.buffer.dtype, kernel.accumulator.dtype, precision, target)
    sizes = _sizes(kernel)
    if name is None or sizes is None:
        return []
    batch, _, n, k = sizes
    form, cost = FORMATS[name], _cost(*sizes, FORMATS[name])
    if cost > _CONCEIVABLE_COST:
        return []
    buffer = Buffer(form.packed_shape(batch if is_batched else 1, k, n), form.dtype, "tiles", constant=True)
    ahead = repacked(kernel, packed, buffer, partial(pack_tiles, form=form))
    if ahead is None and not _is_vnni_of_tiles(weight, k, form):
        return []
    tiles = AmxTiles(
        buffer=weight.buffer if ahead is None else buffer,
        tile_format=name,
        is_batched=is_batched,
        is_vnni=ahead is None,
    )
    product = dataclasses.replace(with_weight(kernel, tiles), stores=_stores(kernel, weight))
    return _variants(product, () if ahead is None else (ahead,), cost)


def _sizes(kernel: CpuMatMulKernel[Weight]) -> tuple[int, int, int, int] | None:
    """Matrices, rows, columns and k, of the first two likely numbers; None where one of the last two is known only at run time."""
    (batch, m, n), k = (variable.extent for variable in kernel.domain), kernel.k.extent
    return (size_hint(batch), size_hint(m), n, k) if isinstance(n, int) and isinstance(k, int) else None


def _is_vnni_of_tiles(weight: Panels | InPlace, k: int, form: TileFormat) -> bool:
    """True if tiles can be loaded from a right operand that every call packs: in VNNI format, panels of 32 columns, whole steps of k."""
    if isinstance(weight, InPlace) or weight.dot is None:
        return False
    is_form = (weight.dot.right, weight.dot.group * form.itemsize) == (form.dtype, 4)
    return is_form and weight.width == PANEL and k % form.depth == 0


def tile_dequantized_products(
    kernel: CpuMatMulKernel[Quantized], packed: Packed | None, target: Target
) -> list[Variant]:
    """The product with a quantized weight on tiles, and the further choices of its schedule; none where it has no such form.

    Both read the weight as it is packed.
    """
    weight = kernel.weight
    # Of any number of rows the kernel by vectors has a way for few and one for many, which the tiles have not.
    if kernel_sizes(kernel) or weight.table is not None or "bfloat16" not in target.isa.tiles:
        return []
    _, m, n, k = (known_int(variable.extent) for variable in (*kernel.domain, kernel.k))
    if m < _SURE_ROWS:
        return []  # to unpack the weight for tiles that are mostly empty gains nothing
    name = _dequantized_format(kernel)
    form, by_integers = FORMATS[name].by_integers, name != "bfloat16"
    if by_integers and weight.group != k and weight.group % form.depth:
        return []
    cost = _cost(1, m, n, k, form, -(-k // weight.group) if by_integers else 0)
    if cost > _CONCEIVABLE_COST:
        return []
    return _variants(dataclasses.replace(kernel, weight=dataclasses.replace(weight, tile_format=name)), (), cost)


def _dequantized_format(kernel: CpuMatMulKernel[Quantized]) -> str:
    """The format of `a`: in as few parts as are exact, or as its weight says that rows may be rounded.

    bfloat16, of `a` and of the dequantized weight, is off by 2.4e-3 of a product (`python -m benchmarks.weights_alone`); rows of 8 bits, 5e-3.
    """
    if kernel.weight.row_parts == 1 or is_rounded(kernel.a, "bfloat16"):
        return "bfloat16"
    if is_rounded(kernel.a, "float16"):
        return "float16 split"
    return "float32" if kernel.weight.row_parts == ROW_PARTS else "float32 high"


def tile_convolutions(kernel: CpuConvKernel[Panels | Taps], packed: Packed | None, target: Target) -> list[Variant]:
    """The convolution as a product on tiles, and the further choices of its schedule; none where it has no such form."""
    _, precision = float32_precision("cpu")
    weight = kernel.weight
    name = _format(kernel.x, weight.buffer.dtype, kernel.accumulator.dtype, precision, target)
    # The schedule of taps multiplies pixels as other numbers than they are, where sums start at something.
    moves_pixels = isinstance(weight, Taps) and (weight.start is not None or kernel.border != 0)
    if packed is None or name is None or moves_pixels:
        return []
    images, *others = (variable.extent for variable in kernel.domain)
    if not all(isinstance(size, int) for size in (*others, *(variable.extent for variable in kernel.x_vars[1:]))):
        return []
    all_outputs, *spatial = map(known_int, others)
    all_channels = known_int(kernel.x_vars[1].extent)
    form = FORMATS[name]
    together = _groups_together(kernel.groups, all_channels, all_outputs, form)
    groups = kernel.groups // together
    channels, outputs = all_channels // groups, all_outputs // groups
    if form.splits and channels % _LANES:
        return []
    if groups > 1 and channels < _LANES:
        return []
    if form.gathers(channels) and form.gathered_vectors(channels, kernel.kernel, kernel.dilation) > _MOST_VECTORS:
        return []
    k = form.conv_depth(channels, kernel.kernel)
    # Kernels by vectors multiply what groups that go together do not share only once.
    cost = together * _cost(1, size_hint(images) * math.prod(spatial), outputs, k, form)
    if cost > _CONCEIVABLE_COST:
        return []
    buffer = Buffer(form.packed_shape(groups, k, outputs), form.dtype, "tiles", constant=True)
    ahead = partial(pack_conv_tiles, form=form, channels=channels, groups=kernel.groups, together=together)
    tiles = with_weight(kernel, AmxTiles(buffer=buffer, tile_format=name))
    convolution = dataclasses.replace(tiles, groups=groups, stores=_stores(kernel, weight))
    return _variants(convolution, (packed.repacked(buffer, ahead),), cost)


def _groups_together(groups: int, channels: int, outputs: int, form: TileFormat) -> int:
    """The number of groups of a convolution that are multiplied as one, with zeros where an output does not read a channel.

    Only of integers: a NaN or an infinity times zero is no zero. `channels`, `outputs`: of all groups.
    """
    if form.itemsize > 1:
        return 1

    def tiles(together: int) -> tuple[int, int, int]:
        """Tiles of all groups; then whether channels begin with a vector."""
        matrices = groups // together
        columns, k = outputs // matrices, channels // matrices
        return matrices * -(-columns // PANEL) * form.steps(k), k % _LANES, together

    return min((count for count in range(1, groups + 1) if groups % count == 0), key=tiles)


def _stores(
    kernel: CpuMatMulKernel[Weight] | CpuConvKernel[Weight], weight: Panels | InPlace | Taps
) -> tuple[Store, ...]:
    """The kernel's stores, of sums that start at zero: what its own start at is added behind."""
    if isinstance(weight, InPlace) or weight.start is None:
        return kernel.stores
    start, (batch, *_), column = weight.start, map(index_of, kernel.domain), index_of(kernel.domain[2])
    if isinstance(kernel, CpuConvKernel):
        outputs = known_int(kernel.domain[1].extent) // kernel.groups
        padded, output = known_int(start.shape[0]) // kernel.groups, index_of(kernel.domain[1])
        place: tuple[Index, ...] = (output // outputs * padded + output % outputs,)
    else:
        place = (batch if kernel.is_batched else as_index(0), column)

    def started(load: Load) -> Expr | None:
        return ops.add(load, start.at(place)) if load.buffer is kernel.accumulator else None

    return tuple(dataclasses.replace(store, value=replace_loads(store.value, started)) for store in kernel.stores)


def _variants(
    kernel: CpuMatMulKernel[AmxTiles | Quantized] | CpuConvKernel[AmxTiles], packed: tuple[Packed, ...], cost: float
) -> list[Variant]:
    """The kernel as its schedule ranks first, second and so on; the latter are for tuning: no first call times what is estimated so."""
    weight = kernel.weight
    # A dequantized weight is rounded, or summed in groups, as the kernel by vectors does not.
    is_exact = isinstance(weight, AmxTiles) and not FORMATS[weight.tile_format].splits
    name = f"amx {weight.tile_format}"
    first = Variant(name, (kernel,), packed, is_exact, cost < _CERTAIN_COST, cost)
    others = [(dataclasses.replace(kernel, schedule_rank=rank),) for rank in range(1, _RANKS)]
    return [
        first,
        *(Variant(f"{name} choice {n}", k, packed, is_exact, cost=2 * cost) for n, k in enumerate(others, 1)),
    ]


def _format(a: Expr, dtype: str, sums: str, precision: str, target: Target) -> str | None:
    """The format's name for an operand `a` and one of `dtype`; None where the processor has no tiles for them.

    `precision`: how products of float32 may round (`machine.float32_precision`).
    """
    bfloat16, float16, int8 = (name in target.isa.tiles for name in ("bfloat16", "float16", "int8"))
    if dtype == a.dtype == sums == "float32" and bfloat16:
        return _float32_format(precision)
    if dtype == "bfloat16" and a.dtype == "float32" and bfloat16:
        return "bfloat16"  # operands of a product have one dtype: `a` is of bfloat16, widened
    if dtype == "float16" and a.dtype == "float32" and (float16 or bfloat16):
        return "float16" if float16 else "float16 split"
    if dtype == "int8" and sums == "int32" and int8:
        source = a.args[0] if isinstance(a, Call) and a.op == "cast" else a
        return source.dtype if source.dtype in ("int8", "uint8") else None
    return None


def _float32_format(precision: str) -> str:
    """`precision`: as of `_format`."""
    return "float32" if precision in EXACT_PRECISIONS else "float32 high"


def _cost(batch: int, m: int, n: int, k: int, form: TileFormat, groups: int = 0) -> float:
    """The estimated time on tiles over that by vectors; infinite where there are too few rows, or nothing to compute.

    `groups`: of k, whose sums are scaled one by one.
    """
    if m < _MIN_ROWS or not (batch and n and k):
        return math.inf
    tiles = -(-m // 16) * 2 * -(-n // PANEL)
    multiplied = tiles * (form.steps(k) * len(form.products) * 16 / _TILE_SHARE + groups * _SCALE_CYCLES)
    by_vectors = m * n * k / (_INTEGER_RATE if form.itemsize == 1 else _VECTOR_RATE)
    cost = (multiplied + m * k * form.copy_cycles) / by_vectors
    return max(cost, _LEAST_COST) if form.splits or m < _SURE_ROWS else cost
