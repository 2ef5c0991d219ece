"""Algebraic simplifications that are exact in floating point."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace, same_spec
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# Largest power of two, as an exponent, whose reciprocal is exact and normal in the dtype.
EXACT_EXPONENT = {torch.float64: 1021, torch.float32: 125, torch.bfloat16: 125, torch.float16: 13}


def simplify(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Replace arithmetic by cheaper arithmetic with bitwise equal results, NaN, infinities and -0.0 included.

    x*1, x/1, x-0 -> x (x+0 only for integers: -0.0 + 0 is 0.0); neg(neg(x)) -> x; x/2^k -> x * 2^-k;
    pow(x, 2), pow(x, 0.5), pow(x, -0.5), pow(x, -1), pow(x, 1) -> what ATen's own power kernel does for these
    exponents. native_dropout(x, 1) -> (x * 0, no element kept), which draws no random numbers: nor does torch.dropout in eager.
    """
    if has_mutation(gm):
        return False
    changed = False
    for node in list(gm.graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None and "val" in node.meta:
            changed |= rule(gm, node)
    return changed


def _scalar(node: torch.fx.Node) -> float | int | None:
    """The node's second argument, if it is a plain number and there is no `alpha` or rounding mode; None otherwise."""
    if node.kwargs or len(node.args) != 2 or isinstance(node.args[1], bool):
        return None
    other = node.args[1]
    return other if isinstance(other, int | float) else None


def _identity_of(neutral: int) -> Callable[[torch.fx.GraphModule, torch.fx.Node], bool]:
    def rule(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
        scalar, x = _scalar(node), node.args[0]
        if scalar is None or scalar != neutral or math.copysign(1, scalar) < 0 or not isinstance(x, torch.fx.Node):
            return False
        return replace(gm, node, x)

    return rule


def _add(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    if node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.is_complex:
        return False
    return _identity_of(0)(gm, node)


def _div(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    if _identity_of(1)(gm, node):
        return True
    scalar, x = _scalar(node), node.args[0]
    limit = EXACT_EXPONENT.get(node.meta["val"].dtype)
    if not scalar or limit is None or not math.isfinite(scalar) or not isinstance(x, torch.fx.Node):
        return False
    mantissa, exponent = math.frexp(scalar)
    if abs(mantissa) != 0.5 or abs(exponent) > limit or x.meta["val"].dtype != node.meta["val"].dtype:
        return False
    return _become(gm, node, aten.mul.Tensor, x, 1.0 / scalar)


def _neg(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    inner: Any = node.args[0]
    return inner.target is aten.neg.default and replace(gm, node, inner.args[0])


def _pow(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    exponent, x = _scalar(node), node.args[0]
    if exponent is None or not isinstance(x, torch.fx.Node):
        return False
    if exponent == 1:
        return replace(gm, node, x)
    if exponent == 2:
        return _become(gm, node, aten.mul.Tensor, x, x)
    dtype = node.meta["val"].dtype
    if exponent == -1 and dtype.is_floating_point:
        return _become(gm, node, aten.reciprocal.default, x)
    # For float16 ATen calls std::pow, where pow(-inf, 0.5) is inf and pow(-0.0, 0.5) is 0.0.
    root = {0.5: aten.sqrt.default, -0.5: aten.rsqrt.default}.get(exponent)
    return root is not None and dtype in (torch.float32, torch.float64, torch.bfloat16) and _become(gm, node, root, x)


def _item(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Replace one of the two results of dropout with p = 1."""
    dropout: Any = node.args[0]
    if dropout.target is not aten.native_dropout.default or dropout.args[1] != 1 or dropout.args[2] is False:
        return False
    x = dropout.args[0]
    if node.args[1] == 0:
        changed = _become(gm, node, aten.mul.Tensor, x, 0.0)
    else:
        changed = _become(gm, node, aten.zeros_like.default, x, dtype=torch.bool)
    if not dropout.users:
        gm.graph.erase_node(dropout)  # dead_code would not remove an operator that draws random numbers
    return changed


def _become(gm: torch.fx.GraphModule, node: torch.fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> bool:
    new = insert(node, target, *args, **kwargs)
    if not same_spec(new.meta["val"], node.meta["val"]):
        gm.graph.erase_node(new)
        return False
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return True


RULES: dict[object, Callable[[torch.fx.GraphModule, torch.fx.Node], bool]] = {
    aten.mul.Tensor: _identity_of(1),
    aten.div.Tensor: _div,
    aten.sub.Tensor: _identity_of(0),
    aten.add.Tensor: _add,
    aten.neg.default: _neg,
    aten.pow.Tensor_Scalar: _pow,
    operator.getitem: _item,
}
