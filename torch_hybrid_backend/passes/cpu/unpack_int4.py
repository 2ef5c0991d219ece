"""PyTorch's matrix products with packed int4 weights, as products with dequantized weights, which our kernels read on any processor.

    _weight_int4pack_mm_for_cpu(x, packed, group, moves)   ->   mm(x, dequantize(q, scale)^T) + mm(sums of x by group, zero)

moves: (K / group, N, 2), a scale and a zero for each group; a weight is (q - 8) * scale + zero. The order of the nibbles in `packed` depends on
the processor. The operator assumes the order of the processor on which it runs, so this order defines the values. The order is found by packing
a known matrix. If it is none of `_FORMS`, or N is no multiple of its block, the operator stays.

Source: PyTorch, aten/src/ATen/native/cpu/int4mm_kernel.cpp (tinygemm for CPU), 2024.
"""

from __future__ import annotations

import functools

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace_by_new
from torch_hybrid_backend.torch_private import quantized_operators, unset_fake_temporarily

aten = torch.ops.aten

# Columns of a block of n columns, and true if a byte holds neighbours c and c + 1; otherwise it holds c and c + n / 2. In order: with AVX-512,
# with AVX2, without either.
_FORMS = ((64, False), (32, False), (32, True))


def unpack_int4(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite the products whose weights are constants. Returns true if there were any."""
    products = [
        node
        for node in gm.graph.find_nodes(op="call_function", target=aten._weight_int4pack_mm_for_cpu.default)
        if ctx.may_rewrite(node)
    ]
    form = _form() if products and not has_mutation(gm) else None
    if form is None:
        return False
    quantized_operators()  # the operators exist from here on
    constant, changed = ctx.constant_nodes(gm), False
    for node in products:
        x, packed, _, moves = node.args
        n = packed.meta["val"].shape[0]
        if packed not in constant or moves not in constant or x in constant or n % form[0]:
            continue
        before = node.prev
        changed |= replace_by_new(gm, node, _product(node, *form), before)
    return changed


def _product(node: Node, block: int, has_neighbours: bool) -> Node:
    x, packed, group, moves = node.args
    assert isinstance(x, Node)
    assert isinstance(packed, Node)
    assert isinstance(group, int)
    make = functools.partial(insert, node)
    quantized = torch.ops.quantized_decomposed
    n, k = packed.meta["val"].shape[0], packed.meta["val"].shape[1] * 2
    dtype = x.meta["val"].dtype

    rows = make(aten.view.default, packed, [n // block, k, block // 2])
    low = make(aten.bitwise_and.Scalar, rows, 15)
    halves = [low, make(aten.__rshift__.Scalar, rows, 4)]
    both = make(aten.stack.default, halves, 3 if has_neighbours else 2)
    columns = make(aten.permute.default, make(aten.view.default, both, [n // block, k, block]), [0, 2, 1])
    unsigned = make(aten.view.default, make(aten.clone.default, columns, memory_format=torch.contiguous_format), [n, k])
    q = make(aten.sub.Tensor, make(aten._to_copy.default, unsigned, dtype=torch.int8), 8)

    def widened(value: Node) -> Node:
        return value if dtype == torch.float32 else make(aten._to_copy.default, value, dtype=torch.float32)

    scales, points = (make(aten.select.int, moves, 2, number) for number in (0, 1))
    by_row = make(aten.clone.default, make(aten.permute.default, scales, [1, 0]), memory_format=torch.contiguous_format)
    how = (q, widened(by_row), None, -8, 7, torch.int8, group, torch.float32)
    weight = make(quantized.dequantize_per_channel_group.default, *how)
    wide = widened(x)
    product = make(aten.mm.default, wide, make(aten.permute.default, weight, [1, 0]))
    sums = make(aten.sum.dim_IntList, make(aten.view.default, wide, [-1, k // group, group]), [2])
    moved = make(aten.add.Tensor, product, make(aten.mm.default, sums, widened(points)))
    return moved if dtype == torch.float32 else make(aten._to_copy.default, moved, dtype=dtype)


@functools.cache
def _form() -> tuple[int, bool] | None:
    """The form of `_FORMS` that the operator uses on this processor; None if it uses another."""
    with unset_fake_temporarily():
        n, k = 128, 32
        known = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        packed = aten._convert_weight_to_int4pack_for_cpu(known, 2)
        for block, has_neighbours in _FORMS:
            rows = packed.view(n // block, k, block // 2)
            both = torch.stack([rows & 15, rows >> 4], 3 if has_neighbours else 2)
            if torch.equal(both.view(n // block, k, block).transpose(1, 2).reshape(n, k).int(), known):
                return block, has_neighbours
    return None
