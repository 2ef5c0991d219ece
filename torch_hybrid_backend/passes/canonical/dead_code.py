"""Dead code elimination."""

from __future__ import annotations

import torch.fx

from torch_hybrid_backend.graph.schema import is_pure
from torch_hybrid_backend.passes.context import PassContext


def dead_code(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Remove unused pure operators and unused constants. Placeholders stay, and so do operators that mutate or assert. Random operators stay
    too: the numbers that later random operators draw depend on them."""
    changed = False
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and is_pure(node):
            gm.graph.erase_node(node)
            changed = True
    used = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for name in [name for name in gm._buffers if name not in used]:
        delattr(gm, name)
        changed = True
    return changed
