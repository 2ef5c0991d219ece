"""Floating-point operations of one ATen node; a multiply-add counts two.

Only matrix products, convolutions and attention count, by the formulas of `torch.utils.flop_counter`. Everything else (pointwise operators,
reductions, normalizations) counts 0: its time is that of its memory traffic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from torch_hybrid_backend.torch_private import OpOverload

_ATTENTION = frozenset(
    {
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_attention_math_for_mps",
    }
)


def _value(argument: object) -> Any:
    if isinstance(argument, torch.fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, list | tuple):
        return [_value(item) for item in argument]
    return argument


def node_flops(node: torch.fx.Node) -> int:
    """Floating-point operations of one call of the node, from the shapes in `meta["val"]`.

    Symbolic sizes count with the value they had when the graph was captured; 0 where that is unknown.
    """
    if not isinstance(node.target, OpOverload):
        return 0
    name = node.target._schema.name
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None and name not in _ATTENTION and name not in _PRODUCTS:
        return 0
    args = [_value(argument) for argument in node.args]
    kwargs = {key: _value(argument) for key, argument in node.kwargs.items()}
    if name in _ATTENTION:
        query, key, value = args[:3]
        # Two products per query head: with the keys, then with the values. With grouped queries there are fewer key heads.
        flops = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    elif formula is None:
        # Every element of the result is a sum over the last dimension of the matrix or first vector.
        summed = args[1] if name == "aten::addmv" else args[0]
        flops = 2 * math.prod(node.meta["val"].shape) * summed.shape[-1]
    else:
        flops = formula(*args, **kwargs, out_val=node.meta.get("val"))
    return _number(flops)


_PRODUCTS = frozenset({"aten::linear", "aten::matmul", "aten::mv", "aten::addmv", "aten::dot"})


def _number(flops: int | torch.SymInt) -> int:
    if isinstance(flops, int):
        return flops
    hint = flops.node.hint
    return int(hint) if hint is not None else 0
