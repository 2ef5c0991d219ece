"""What reduced precision made of a graph, counted."""

from __future__ import annotations

from collections import Counter

import torch.fx

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.precision import DEFAULT_TOLERANCES
from torch_hybrid_backend.graph.precision import computes, converted_to, is_cast
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.graph.values import constant_nodes
from torch_hybrid_backend.passes.context import PassContext


def conversion(gm: torch.fx.GraphModule, ctx: PassContext, tolerance: float | None = None) -> Conversion:
    """The counts for a graph after the passes that reduce its precision. tolerance: None for the precision's own."""
    constant = constant_nodes(gm, ctx.constants)
    casts = [node for node in gm.graph.nodes if is_cast(node)]
    computing = [node for node in gm.graph.nodes if node not in constant and computes(node)]
    converted = Counter(name for name in map(converted_to, computing) if name is not None)
    reasons = {**gm.meta.get("as_written", {}), **ctx.as_written}
    left = tuple(
        Unconverted(node.name, str(node.target), reasons[node.name].code, reasons[node.name].why, source_line(node))
        for node in computing
        if node.name in reasons and converted_to(node) is None
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
