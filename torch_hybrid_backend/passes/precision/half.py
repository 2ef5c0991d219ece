"""Half precision in float32 inference graphs: casts at the borders of the operators that `paint` chooses.

    linear(x, W)    ->    cast32(linear(cast16(x), cast16(W)))

Casts of parameters depend on nothing else, so hoisting computes them once. Values computed from parameters alone (weights with a batch norm
folded in) are computed in float32, then cast. Every value keeps its shape and strides: an operator whose strides would change stays as written.
Outputs keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.graph.precision import converted_to
from torch_hybrid_backend.graph.schema import has_effects, is_item
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.precision.lists import is_layer, read_as_written, reads_form
from torch_hybrid_backend.passes.precision.paint import paint
from torch_hybrid_backend.passes.rewrite import insert, same_dims
from torch_hybrid_backend.torch_private import FakeTensorMode, detect_fake_mode, tree_leaves

aten = torch.ops.aten

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8+bf16": torch.bfloat16}


def half(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Convert the operators that gain by half precision, if `ctx.precision` asks for it. Returns true if any was converted.

    Converted operators carry `meta["precision"]`, the dtype's name. Layers that are not converted, for another reason than `ctx.as_written`,
    are in `gm.meta["as_written"]`: name -> reason.
    """
    dtype = DTYPES.get(ctx.precision)
    if dtype is None or has_mutation(gm):
        return False
    # Expanded values are no constants here: they are cast before the expansion, which costs nothing in a loop.
    constant = {node for node in ctx.constant_nodes(gm) if node.target is not aten.expand.default}
    as_written = {node: ctx.as_written[node.name] for node in gm.graph.nodes if node.name in ctx.as_written}
    # A layer that is merely slower in half precision does not keep its readers from being converted.
    refused = {node: why for node, why in as_written.items() if why.code is Reason.SLOWER}
    denied = as_written.keys() - refused.keys()
    while True:
        painted = paint(gm.graph, dtype, lambda node: node not in refused and _is_free(node, ctx, constant), denied)
        trial = _Trial(gm, dtype, painted)
        if not trial.refused:
            break
        refused.update(trial.refused)
    left = {node.name: why for node, why in refused.items() if is_layer(node)}
    gm.meta["as_written"] = {**gm.meta.get("as_written", {}), **left}
    if painted:
        _convert(gm, dtype, painted, trial.values)
    return bool(painted)


def _is_free(node: Node, ctx: PassContext, constant: set[Node]) -> bool:
    """True if the operator computes float32 values in each call, and no argument of it is a dtype."""
    if node.op != "call_function" or node in constant or has_effects(node) or not ctx.may_rewrite(node):
        return False
    if is_layer(node) and converted_to(node) is not None:
        return False  # it is quantized
    if any(isinstance(value, torch.dtype) for value in tree_leaves((node.args, node.kwargs))):
        return False
    made = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    floats = [value for value in made if value.is_floating_point()]
    return bool(floats) and all(value.dtype == torch.float32 for value in floats)


class _Trial:
    """Trial run, on fake tensors, of the graph with the operators of `painted` in `dtype`. `values`: changed values. `refused`: operators that
    cannot be converted, with the reason."""

    def __init__(self, gm: torch.fx.GraphModule, dtype: torch.dtype, painted: set[Node]) -> None:
        self.values: dict[Node, Any] = {}
        self.refused: dict[Node, Refused] = {}
        self._dtype = dtype
        self._name = str(dtype).removeprefix("torch.")
        nodes = list(gm.graph.nodes)
        self._mode = detect_fake_mode([node.meta.get("val") for node in nodes]) or FakeTensorMode()
        for node in nodes:
            if node in painted or (is_item(node) and node.args[0] in self.values):
                self._try(node)
        for node in list(self.values):
            if any(user not in painted and not (is_item(user) or reads_form(user)) for user in node.users):
                self._try_back(node)

    def _try(self, node: Node) -> None:
        wide = read_as_written(node)

        def value(source: Node) -> Any:
            known = self.values.get(source, source.meta["val"])
            return known.to(self._dtype) if source not in wide and _is_wide(known) else known

        try:
            with self._mode:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
                made = node.target(*args, **kwargs)  # type: ignore[operator]
        except failures(RuntimeError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            self.refused[node] = Refused(Reason.UNSUPPORTED, f"it does not take {self._name}: {why}")
            return
        before, after = tree_leaves(node.meta["val"]), tree_leaves(made)
        if all(_same_layout(a, b) for a, b in zip(before, after, strict=True)):
            self.values[node] = made
        else:
            self.refused[node] = Refused(Reason.UNSUPPORTED, f"of {self._name} its results have other strides")

    def _try_back(self, node: Node) -> None:
        """Refuse an operator whose result, cast back for readers in float32, has other strides than before."""
        made, before = self.values[node], node.meta["val"]
        if not isinstance(made, torch.Tensor) or made.dtype == before.dtype:
            return
        with self._mode:
            back = made.to(before.dtype)
        if not _same_layout(before, back):
            maker = node.args[0] if is_item(node) else node
            assert isinstance(maker, Node)
            self.refused[maker] = Refused(
                Reason.UNSUPPORTED, f"a cast from {self._name} would change the strides of its result"
            )


def _same_layout(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return not isinstance(b, torch.Tensor)
    return same_dims(a.shape, b.shape) and same_dims(a.stride(), b.stride())


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _convert(gm: torch.fx.GraphModule, dtype: torch.dtype, painted: set[Node], values: Mapping[Node, Any]) -> None:
    """Insert the casts: for each value at most one to `dtype` and one back."""
    casts: dict[tuple[Node, torch.dtype], Node] = {}
    written = {node: node.meta.get("val") for node in gm.graph.nodes}  # before any of it is changed

    def cast(value: Node, to: torch.dtype, before: Node) -> Node:
        if (value, to) not in casts:
            casts[value, to] = insert(before, aten._to_copy.default, value, origin=value, dtype=to)
        return casts[value, to]

    for node in list(gm.graph.nodes):
        if is_item(node) or reads_form(node):
            pass  # an item follows its operator
        elif node in painted:
            wide = read_as_written(node)
            for source in list(node.all_input_nodes):
                if source not in wide and _is_wide(source.meta.get("val")):
                    node.replace_input_with(source, cast(source, dtype, node))
            node.meta["precision"] = str(dtype).removeprefix("torch.")
        else:
            for source in list(node.all_input_nodes):
                now, before = values.get(source), written[source]
                if isinstance(now, torch.Tensor) and now.dtype != before.dtype:
                    node.replace_input_with(source, cast(source, before.dtype, node))
        if node in values:
            node.meta["val"] = values[node]
