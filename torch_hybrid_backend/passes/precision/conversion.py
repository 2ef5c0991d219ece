"""What reduced precision made of a graph, counted."""

from __future__ import annotations

from collections import Counter

import torch
import torch.fx
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.precision import DEFAULT_TOLERANCES
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.graph.values import constant_nodes
from torch_hybrid_backend.passes.context import PassContext

aten = torch.ops.aten

_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_QUANTISERS = "quantized_decomposed"


def conversion(gm: torch.fx.GraphModule, ctx: PassContext, tolerance: float | None = None) -> Conversion:
    """The counts for a graph after the passes that reduce its precision. tolerance: None for the precision's own."""
    constant = constant_nodes(gm, ctx.constants)
    casts = [node for node in gm.graph.nodes if is_cast(node)]
    computing = [node for node in gm.graph.nodes if node not in constant and not is_cast(node) and _computes(node)]
    converted = Counter(str(node.meta["precision"]) for node in computing if "precision" in node.meta)
    reasons = {**gm.meta.get("as_written", {}), **ctx.as_written}
    left = tuple(
        Unconverted(node.name, str(node.target), reasons[node.name].code, reasons[node.name].why, source_line(node))
        for node in computing
        if node.name in reasons and "precision" not in node.meta
    )
    return Conversion(
        precision=ctx.precision,
        tolerance=DEFAULT_TOLERANCES[ctx.precision] if tolerance is None else tolerance,
        operators=len(computing),
        converted=tuple(converted.most_common()),
        casts=sum(node not in constant for node in casts),
        weight_casts=sum(node in constant for node in casts),
        left=left,
    )


def is_cast(node: Node) -> bool:
    """Whether the node changes the precision of floating-point values: a cast between such dtypes, or a quantisation."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if target.namespace == _QUANTISERS:
        return target._schema.name.startswith(f"{_QUANTISERS}::quantize")
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if target not in _CASTS or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype != after.dtype and before.is_floating_point() and after.is_floating_point()


def _computes(node: Node) -> bool:
    """Whether the operator makes floating-point values of its own."""
    if node.op != "call_function" or is_item(node) or is_view(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == _QUANTISERS:
        return False
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
