"""Small kernels of every kind, made anew by each call."""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, var
from torch_hybrid_backend.loops.ir import Buffer, Load, scalar_index
from torch_hybrid_backend.loops.kernels import (
    Argument,
    AttentionKernel,
    Kernel,
    MapKernel,
    RowKernel,
    ScatterKernel,
    Stage,
    Store,
)
from torch_hybrid_backend.loops.layout import Blocked, contiguous
from torch_hybrid_backend.sizes.size import Dim


def argument(*shape: Dim, name: str = "", dtype: str = "float32") -> Argument:
    return Argument(Buffer(shape, dtype, name), contiguous(shape))


def scale_kernel(size: Dim = 64, factor: float = 2.0, name: str = "i") -> MapKernel:
    """out[i] = relu(x[i]) * factor."""
    x, out = argument(size, name=f"x of {name}"), argument(size, name=f"out of {name}")
    i = var(name, size)
    value = ops.call("max", x.buffer.at((i,)), ops.const(0.0, "float32"))
    stores = (Store(out.buffer, (i,), ops.mul(value, ops.const(factor, "float32"))),)
    return MapKernel((x,), (out,), (LoopVar(name, size),), stores)


def row_sum_kernel(rows: Dim = 4, columns: Dim = 8) -> RowKernel:
    """out[r] = sum of (x[r, c] + x[r, c])."""
    x, out = argument(rows, columns), argument(rows)
    domain = (LoopVar("r", rows), LoopVar("c", columns))
    r, c = var("r", rows), var("c", columns)
    element = x.buffer.at((r, c))
    total = Buffer((rows,), "float32", "total")
    stages = (
        Stage("reduce", total, ops.add(element, element), "sum"),
        Stage(
            "store_scalar",
            None,
            Load("float32", total, (r,)),
            store=Store(out.buffer, (r,), Load("float32", total, (r,))),
        ),
    )
    return RowKernel((x,), (out,), domain, (1,), stages)


def scatter_kernel(points: int = 20, size: int = 6) -> ScatterKernel:
    """out[index[i]] = the larger one of itself and x[i], for every i in no order; out (size,) float32, index int64 below size."""
    x, index, out = argument(points), argument(points, dtype="int64"), argument(size)
    i = var("i", points)
    place = scalar_index(index.buffer.at((i,)), 0, size - 1)
    store = Store(out.buffer, (place,), x.buffer.at((i,)))
    return ScatterKernel((x, index), (out,), (LoopVar("i", points),), store, "max")


def matmul_kernel() -> CpuMatMulKernel[Panels]:
    """out[0, m, n] = sum over k of a[m, k] * b[k, n], b packed in tiles of 32 columns."""
    a, packed, out = argument(1, 8, 16), argument(1, 2, 16, 32), argument(1, 8, 64)
    domain = (LoopVar("b", 1), LoopVar("m", 8), LoopVar("n", 64))
    m, n = var("m", 8), var("n", 64)
    accumulator = Buffer((1, 8, 64), "float32", "acc")
    point = (as_index(0), m, n)
    return CpuMatMulKernel(
        reads=(a, packed),
        writes=(out,),
        domain=domain,
        k=LoopVar("k", 16),
        a=a.buffer.at((as_index(0), m, var("k", 16))),
        weight=Panels(buffer=packed.buffer, width=32),
        accumulator=accumulator,
        stores=(Store(out.buffer, point, accumulator.at(point)),),
    )


def conv_kernel() -> CpuConvKernel[Panels]:
    """A 3x3 convolution of 16 channels of 6x6 in blocked layout."""
    x = Argument(Buffer((1, 16, 6, 6), "float32"), Blocked(16))
    out = Argument(Buffer((1, 16, 6, 6), "float32"), Blocked(16))
    packed = argument(1, 1, 3, 16, 3, 16)
    domain = tuple(LoopVar(f"o{d}", n) for d, n in enumerate((1, 16, 6, 6)))
    x_vars = tuple(LoopVar(f"x{d}", n) for d, n in enumerate((1, 16, 6, 6)))
    point = tuple(var(v.name, v.extent) for v in domain)
    accumulator = Buffer((1, 16, 6, 6), "float32", "acc")
    return CpuConvKernel(
        reads=(x, packed),
        writes=(out,),
        domain=domain,
        x_vars=x_vars,
        x=x.buffer.at(tuple(var(v.name, v.extent) for v in x_vars)),
        weight=Panels(buffer=packed.buffer, width=16),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        groups=1,
        kernel=(3, 3),
        accumulator=accumulator,
        stores=(Store(out.buffer, point, accumulator.at(point)),),
    )


def attention_kernel() -> AttentionKernel:
    """Causal attention of 2 heads, 4 positions, width 8."""
    shape = (1, 2, 4, 8)
    q, k, v, out = (argument(*shape) for _ in range(4))

    def variables(stem: str) -> tuple[LoopVar, ...]:
        return tuple(LoopVar(f"{stem}{d}", n) for d, n in enumerate(shape))

    point = tuple(var(f"o{d}", n) for d, n in enumerate(shape))
    accumulator = Buffer(shape, "float32", "acc")
    loads = {
        stem: a.buffer.at(tuple(var(f"{stem}{d}", n) for d, n in enumerate(shape)))
        for stem, a in (("q", q), ("k", k), ("v", v))
    }
    return AttentionKernel(
        (q, k, v),
        (out,),
        variables("o"),
        q=loads["q"],
        q_vars=variables("q"),
        k=loads["k"],
        k_vars=variables("k"),
        v=loads["v"],
        v_vars=variables("v"),
        score=None,
        score_vars=(),
        product=Buffer((1, 2, 4, 4), "float32", "product"),
        scale=0.5,
        causal=True,
        accumulator=accumulator,
        stores=(Store(out.buffer, point, accumulator.at(point)),),
    )


def every_kind() -> dict[str, Kernel]:
    return {
        "map": scale_kernel(),
        "row": row_sum_kernel(),
        "matmul": matmul_kernel(),
        "conv": conv_kernel(),
        "attention": attention_kernel(),
    }
