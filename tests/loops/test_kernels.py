"""Kernels as plain data: what they cost, and the sizes that they depend on."""

from __future__ import annotations

import dataclasses

import pytest

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import (
    Argument,
    ConvKernel,
    MapKernel,
    MatMulKernel,
    Store,
    counts_far,
    kernel_counts,
    kernel_sizes,
)
from torch_hybrid_backend.loops.layout import Blocked, Strided, contiguous
from torch_hybrid_backend.sizes.size import Dim, symbol


def argument(*shape: Dim) -> Argument:
    return Argument(Buffer(shape, "float32"), contiguous(shape))


def map_kernel(*shape: Dim) -> MapKernel:
    """out = x + x."""
    x, out = argument(*shape), argument(*shape)
    point = tuple(var(f"i{d}", n) for d, n in enumerate(shape))
    value = ops.add(x.buffer.at(point), x.buffer.at(point))
    domain = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
    return MapKernel((x,), (out,), domain, (Store(out.buffer, point, value),))


def test_memory_of_arguments() -> None:
    """The memory of an argument has padding and gaps between rows included."""
    buffer = Buffer((2, 20, 3), "float32")
    assert Argument(buffer, contiguous(buffer.shape)).span == 120
    assert Argument(buffer, Blocked(16)).span == 2 * 2 * 3 * 16
    assert Argument(buffer, Strided((100, 4, 1))).span == 100 + 19 * 4 + 2 + 1


def test_work_of_products() -> None:
    """The work of products is that of typical sizes where they are known at run time only; none for other kernels."""
    m, k = symbol("m", 30), symbol("k", 7)
    a, b, out = argument(2, m, k), argument(2, k, 5), argument(2, m, 5)
    domain = tuple(LoopVar(f"d{d}", n) for d, n in enumerate(out.buffer.shape))
    depth = LoopVar("k", k)
    batch, row, column = map(index_of, domain)
    kernel = MatMulKernel(
        (a, b),
        (out,),
        domain,
        depth,
        a.buffer.at((batch, row, index_of(depth))),
        b.buffer.at((batch, index_of(depth), column)),
        Buffer(out.buffer.shape, "float32"),
        (),
    )
    assert kernel.multiply_adds == 2 * 30 * 5 * 7
    assert kernel_sizes(kernel) == [s for size in (m, k) for s in kernel_sizes(map_kernel(size))]
    assert map_kernel(64).multiply_adds == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_work_of_convolutions(groups: int) -> None:
    """Each output sums over its group's channels and the window."""
    x, w, out = argument(1, 4, 9, 9), argument(6, 4 // groups, 3, 3), argument(1, 6, 7, 7)
    x_vars, w_vars, domain = (
        tuple(LoopVar(f"{stem}{d}", n) for d, n in enumerate(a.buffer.shape))
        for stem, a in zip("xwd", (x, w, out), strict=True)
    )
    kernel = ConvKernel(
        (x, w), (out,), domain,
        x_vars, x.buffer.at(tuple(map(index_of, x_vars))), w_vars, w.buffer.at(tuple(map(index_of, w_vars))),
        (1, 1), (0, 0), (1, 1), groups, Buffer(out.buffer.shape, "float32"), (),
    )  # fmt: skip
    assert kernel.multiply_adds == 6 * 49 * 9 * 4 / groups
    assert kernel_sizes(kernel) == []


def test_sizes_in_a_fixed_order() -> None:
    """Those of the domain first, then of the arguments, then what expressions alone mention; each once."""
    n, m, k, j = (symbol(name) for name in "nmkj")

    def names(kernel: MapKernel) -> list[str]:
        return [size.name for size in kernel_sizes(kernel)]

    assert names(map_kernel(3, 4)) == []
    assert names(map_kernel(m, n, m + n)) == ["m", "n"]
    kernel = map_kernel(n, 4)
    read = Argument(Buffer((k, n), "float32"), Strided((n, 1)))
    (store,) = kernel.stores
    deep = ops.add(store.value, ops.from_index(store.index[0] * j + 1))
    changed = dataclasses.replace(kernel, reads=(read,), stores=(dataclasses.replace(store, value=deep),))
    assert names(changed) == ["n", "k", "j"]


def test_how_far_kernels_count() -> None:
    """Points and elements, by numbers where all are known; sizes known only at run time are looked at where they are."""
    s = symbol("s")
    assert not counts_far(map_kernel(1 << 15, 1 << 15))
    assert counts_far(map_kernel(1 << 16, 1 << 15))
    assert kernel_counts(map_kernel(4, 8)) == ()
    assert kernel_counts(map_kernel(s, 8)) == (s * 8,)
    kernel = map_kernel(s, 8)
    point = kernel.stores[0].index
    store = Store(kernel.stores[0].buffer, point, ops.from_index(point[0] * 3 + s, "float32"))
    assert kernel_counts(dataclasses.replace(kernel, stores=(store,))) == (s * 8, (s + 1) * 3 + s)
