"""Constant folding: values that depend on no input are computed once."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.eager_graph import TracedRun
from torch_hybrid_backend.graph.quantized import is_dequantized
from torch_hybrid_backend.graph.schema import is_pure, is_view
from torch_hybrid_backend.graph.values import has_mutation, returned_roots
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import ORIGIN_KEYS
from torch_hybrid_backend.torch_private import OpOverload, unset_fake_temporarily

aten = torch.ops.aten

# Values that a loop computes from its indices at no cost. Reading a buffer would cost more.
FREE = frozenset(
    {
        *(aten.full.default, aten.full_like.default, aten.scalar_tensor.default),
        *(aten.arange.default, aten.arange.start, aten.arange.start_step),
    }
)
# Operators whose results have undefined contents: two evaluations may differ.
UNDEFINED = frozenset(
    {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.empty_permuted.default}
)


def fold_constants(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Replace each largest expression without tensor inputs (masks, position indices, arithmetic on lifted constants)
    by a `get_attr` buffer of its value, or by `full` if all its elements are equal.

    These are left alone:

    - fills and ranges, which are free in a loop
    - views of constants, whose base is folded
    - outputs, as every call must return fresh memory
    - values that are not static, or exceed `ctx.fold_limit_bytes`
    - values on another device than the CPU: reading them would wait for that device, and `passes.hoist` computes them once as well
    """
    if has_mutation(gm):
        return False
    constant = input_free(gm, ctx)
    for node in returned_roots(gm):
        constant.pop(node, None)
    roots = [
        node
        for node in constant
        if node.op == "call_function"
        and not is_view(node)
        and node.target not in FREE
        and isinstance(node.meta.get("val"), torch.Tensor)
        and _reaches_variable(node, constant)
    ]
    if not roots:
        return False
    values = evaluate(gm, roots)
    for node in roots:
        _install(gm, node, values[node])
    return True


def input_free(gm: torch.fx.GraphModule, ctx: PassContext) -> dict[torch.fx.Node, None]:
    """Nodes that depend on no placeholder, are pure, static, small and on the CPU, and no dequantized values; in graph order."""
    constant: dict[torch.fx.Node, None] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            foldable = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        else:
            foldable = (
                is_deterministic(node)
                and not is_dequantized(node, ctx.keeps_packed)
                and all(argument in constant for argument in node.all_input_nodes)
                and all(_can_be_read(tensor, ctx.fold_limit_bytes) for tensor in _tensors(value))
            )
        if foldable:
            constant[node] = None
    return constant


def is_deterministic(node: torch.fx.Node) -> bool:
    """True if the node is a tensor operator (or getitem) whose result depends on its arguments alone."""
    if not is_pure(node) or node.target in UNDEFINED:
        return False
    return isinstance(node.target, OpOverload) or node.target is operator.getitem


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _can_be_read(value: Any, limit_bytes: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    if not TensorSpec.of(value).is_static:
        return False
    return value.numel() * value.itemsize <= limit_bytes


def _reaches_variable(node: torch.fx.Node, constant: dict[torch.fx.Node, None]) -> bool:
    """True if a node outside the constants uses the value, directly or through views. Otherwise a larger expression contains the value."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in constant:
            return True
        if is_view(user):
            pending.extend(user.users)
    return False


def evaluate(gm: torch.fx.GraphModule, roots: list[torch.fx.Node]) -> dict[torch.fx.Node, torch.Tensor]:
    """The values of `roots`, nodes of `input_free`, and of all nodes from which they are computed."""
    needed: set[torch.fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    run = TracedRun(gm)
    with unset_fake_temporarily(), torch.no_grad():
        for node in gm.graph.nodes:
            if node in needed:
                run.env[node] = run.run_node(node)
    return run.env


def _install(gm: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    expected = node.meta["val"]
    with unset_fake_temporarily():
        if value.stride() != expected.stride():
            value = torch.empty_strided(
                expected.shape, expected.stride(), dtype=value.dtype, device=value.device
            ).copy_(value)
        first = value.flatten()[0].item() if value.numel() else None
        uniform = (
            first is not None
            and value.is_contiguous()
            and bool((value == first).all())
            and not _is_negative_zero(value)
        )
    with gm.graph.inserting_before(node):
        if uniform:
            new = gm.graph.call_function(
                aten.full.default,
                (list(value.shape), first),
                {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False},
            )
        else:
            name = _unused_name(gm)
            gm.register_buffer(name, value, persistent=False)
            new = gm.graph.get_attr(name)
    new.meta = {key: node.meta[key] for key in ("val", *ORIGIN_KEYS) if key in node.meta}
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _is_negative_zero(value: torch.Tensor) -> bool:
    """True if the values contain zeros and negative signs: -0.0 equals 0.0, so equality does not tell them apart."""
    return value.dtype.is_floating_point and bool((value == 0).any()) and bool(torch.signbit(value).any())


def _unused_name(gm: torch.fx.GraphModule) -> str:
    number = 0
    while hasattr(gm, f"_folded_constant{number}"):
        number += 1
    return f"_folded_constant{number}"
