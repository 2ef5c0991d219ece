"""Reads of `as_strided`: the memory that a tensor lies in, gaps between the tensor's elements included.

    as_strided(repeat(x)[:, ::2], size, stride)  ->  as_strided(repeat(x), size, stride)

Where the tensor is a view, engines hand on its elements and nothing else. So `as_strided` is given what the view is of. A view that does not
begin where an input begins needs two steps more, as the input may begin anywhere in its memory:

    as_strided(x[:, 1::2], size, stride)  ->  as_strided(as_strided(x, [n], [1])[1:], size, stride)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.tensor_spec import dim
from torch_hybrid_backend.graph.values import storage_root

aten = torch.ops.aten


def read_owners(graph_module: torch.fx.GraphModule) -> None:
    """Edits the graph in place: no `as_strided` is of a view, but for those whose numbers are only known in a call."""
    changed = False
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        view, size, stride, *offset = node.args
        owner = storage_root(view)
        seen, whole = view.meta["val"], owner.meta["val"]
        if owner is view or seen.dtype != whole.dtype:
            continue
        begins = offset[0] if offset else node.kwargs.get("storage_offset")
        if begins is None and dim(seen.storage_offset()) != dim(whole.storage_offset()):
            if owner.op == "call_function":
                begins = seen.storage_offset()
            else:
                owner = _read_from(owner, seen.storage_offset() - whole.storage_offset(), size, stride, node) or view
            if owner is view or not isinstance(begins, int | None):
                continue
        node.args = (owner, size, stride) if begins is None else (owner, size, stride, begins)
        node.kwargs = {}
        changed = True
    if changed:
        graph_module.recompile()


def _read_from(owner: Node, begins: Any, size: Any, stride: Any, reader: Node) -> Node | None:
    """The memory that the reader needs, in one dimension, from `begins` elements behind the owner's first; None where numbers are not known."""
    if not all(isinstance(number, int) for number in (begins, *size, *stride)) or begins < 0 or 0 in size:
        return None
    end = begins + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    memory = owner
    with reader.graph.inserting_before(reader):
        for target, arguments in ((aten.as_strided.default, ([end], [1])), (aten.slice.Tensor, (0, begins, end))):
            value = target(memory.meta["val"], *arguments)
            memory = reader.graph.call_function(target, (memory, *arguments))
            memory.meta.update(reader.meta, val=value)
    return memory
