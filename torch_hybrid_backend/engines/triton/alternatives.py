"""The ways of computing products, convolutions and attention that are worth timing: tilings, and parts along k. Nothing here imports Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.triton.kernels import FlashKernel, split_along_keys
from torch_hybrid_backend.engines.triton.schedules import attention, convolution, depthwise, matmul, stream_k
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    FixUpKernel,
    StreamMatMulKernel,
    TiledConvKernel,
    TiledMatMulKernel,
    Tiling,
    ranked,
)
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.index import LoopVar, as_index, contiguous_strides, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, buffers_of_expr
from torch_hybrid_backend.loops.kernels import Argument, ConvKernel, Kernel, MapKernel, MatMulKernel, Store, as_kind
from torch_hybrid_backend.loops.layout import Strided, contiguous
from torch_hybrid_backend.loops.ops import add

_MOST = 3  # beside the kernel itself
_CERTAIN_GAIN = 1.2  # of the estimate: what is preferred to the kernel before anything is timed


def alternatives(kernel: Kernel, target: Target) -> list[Variant]:
    """The other ways of computing a kernel, best estimate first: the best of each shape of tile, and of each way of sharing the work."""
    if isinstance(kernel, FlashKernel):
        parts = attention.parts_of_keys(kernel, target)
        if parts == 1:
            return []
        shared = split_along_keys(kernel, parts)
        return [Variant(f"keys in {parts} parts", shared, is_preferred=True, cost=1 / parts)]
    if isinstance(kernel, MatMulKernel):
        own, work = matmul.tiling_of(kernel, target), matmul.work_of(kernel, target)
    elif isinstance(kernel, ConvKernel) and not depthwise.serves(kernel):
        own, work = convolution.tiling_of(kernel, target), convolution.work_of(kernel, target)
    else:
        return []
    costs = dict(ranked(work, target))
    of_kind: dict[tuple[int | bool, ...], Tiling] = {}
    for tiling in costs:
        if tiling != own:
            of_kind.setdefault(tiling.kind, tiling)
    found: list[Variant] = []
    for tiling in [*of_kind.values()][:_MOST]:
        cost = costs[tiling] / costs[own] if costs[own] else 1.0
        # One that TMA serves is for the clock alone: on a GPU it has not run yet.
        is_first = not tiling.persistent and not any(variant.is_preferred for variant in found)
        is_preferred = is_first and cost * _CERTAIN_GAIN < 1
        found.append(Variant(tiling.name, tiled(kernel, tiling), is_preferred=is_preferred, cost=cost))
    return found


def tiled(kernel: MatMulKernel | ConvKernel, tiling: Tiling) -> tuple[Kernel, ...]:
    """The kernels that compute what `kernel` does, cut up as `tiling` says.

    Where that splits k (split-K), the first writes the sums of the parts, in the accumulator's dtype, and the second adds those in a fixed
    order, and has the epilogue: results do not depend on which program is done first. Where programs share the last tiles (stream-K), the
    second does so with these.
    """
    if tiling.sharers:
        assert isinstance(kernel, MatMulKernel)
        return _stream(kernel, tiling)
    if tiling.splits == 1:
        return (_with(kernel, tiling=tiling),)
    sums = kernel.accumulator
    part = LoopVar("part", tiling.splits)
    partial = Argument(Buffer((tiling.splits, *sums.shape), sums.dtype, "partial"), _layout_like(kernel))
    point = tuple(map(index_of, kernel.domain))
    operands = (kernel.a, kernel.b) if isinstance(kernel, MatMulKernel) else (kernel.x, kernel.w)
    first = _with(
        kernel,
        reads=_read_by(kernel, operands),
        writes=(partial,),
        stores=(Store(partial.buffer, (index_of(part), *point), sums.at(point)),),
        tiling=tiling,
        part=part,
    )

    def total(load: Load) -> Expr | None:
        if load.buffer is not sums:
            return None
        return _sum([partial.buffer.at((as_index(i), *load.index)) for i in range(tiling.splits)])

    stores = tuple(Store(store.buffer, store.index, replace_loads(store.value, total)) for store in kernel.stores)
    rest = _read_by(kernel, [store.value for store in kernel.stores])
    return first, MapKernel((partial, *rest), kernel.writes, kernel.domain, stores)


def _stream(kernel: MatMulKernel, tiling: Tiling) -> tuple[Kernel, ...]:
    sums = kernel.accumulator
    shape = (stream_k.shares_in(kernel.domain, kernel.k, tiling).sums, tiling.rows, tiling.columns)
    partial = Argument(Buffer(shape, sums.dtype, "partial"), contiguous(shape))
    first = _with(kernel, StreamMatMulKernel, writes=(*kernel.writes, partial), tiling=tiling, partial=partial.buffer)
    rest = _read_by(kernel, [store.value for store in kernel.stores])
    common = (kernel.domain, tiling, kernel.k, partial.buffer, sums, kernel.stores)
    return first, FixUpKernel((partial, *rest), kernel.writes, *common)


def _with(kernel: MatMulKernel | ConvKernel, kind: type[Kernel] | None = None, **changed: object) -> Kernel:
    """The kernel with a tiling, and other fields changed."""
    kind = kind or (TiledMatMulKernel if isinstance(kernel, MatMulKernel) else TiledConvKernel)
    return as_kind(kernel, kind, **changed)


def _read_by(kernel: Kernel, exprs: Sequence[Expr]) -> tuple[Argument, ...]:
    used = {buffer for expr in exprs for buffer in buffers_of_expr(expr)}
    return tuple(argument for argument in kernel.reads if argument.buffer in used)


def _layout_like(kernel: MatMulKernel | ConvKernel) -> Strided:
    """The parts one after the other, each in the order of memory of the first result: channels last, or row-major."""
    shape = kernel.accumulator.shape
    write = kernel.writes[0]
    is_image = isinstance(kernel, ConvKernel) and write.buffer.shape == shape
    if is_image and isinstance(write.layout, Strided) and write.layout.strides[1] == 1:
        n, *spatial, channels = contiguous_strides((shape[0], *shape[2:], shape[1]))
        strides = (n, channels, *spatial)
    else:
        strides = contiguous_strides(shape)
    whole = contiguous_strides((1, *shape))[0]
    return Strided((whole, *strides))


def _sum(terms: Sequence[Expr]) -> Expr:
    """The terms added by halves: the error grows with the logarithm of their number."""
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return add(_sum(terms[:middle]), _sum(terms[middle:]))
