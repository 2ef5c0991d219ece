"""Choice of the operators of an inference graph that compute in half precision, so that few casts are needed.

    x -> linear -> add -> relu -> linear -> softmax -> exp -> mul      linear, add, relu, linear

The operators are painted as in TensorFlow's auto mixed precision (grappler/optimizers/auto_mixed_precision.cc, 2020), by the lists of `lists`:

1. ALLOW operators are painted.
2. DENY operators are not painted. Nor are their readers: INFER operators, and CLEAR operators on the way to another INFER or DENY operator.
3. INFER and CLEAR operators between painted operators are painted.
4. CLEAR operators after a painted operator are painted.
5. CLEAR operators before painted operators are painted, if nothing else reads them and their result is not smaller than their inputs. The cast
   is then of as many elements or of fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.schema import is_item
from torch_hybrid_backend.passes.precision.lists import (
    ALLOW,
    INFER,
    is_clear,
    is_denied,
    is_on,
    read_as_written,
    reads_form,
)
from torch_hybrid_backend.passes.rewrite import same_dim


def paint(
    graph: torch.fx.Graph, dtype: torch.dtype, is_free: Callable[[Node], bool], denied: Set[Node] = frozenset()
) -> set[Node]:
    """The operators that are to compute in `dtype`, bfloat16 or float16.

    is_free: true for an operator that may be painted. denied: operators that count as DENY in addition.
    """
    nodes = list(graph.nodes)
    clear = {node for node in nodes if is_clear(node) and is_free(node)}
    infer = {node for node in nodes if is_on(node, INFER) and is_free(node)}
    allow = {node for node in nodes if is_on(node, ALLOW) and is_free(node)} - denied
    deny = {node for node in nodes if node in denied or is_denied(node, dtype)}
    infer -= deny

    dangerous = _joined(reversed(nodes), infer | deny, clear, _users)
    deny = _joined(nodes, deny, dangerous, _sources)
    free = (infer | clear) - deny
    painted = allow | (_joined(nodes, allow, free, _sources) & _joined(reversed(nodes), allow, free, _users))
    painted |= _joined(nodes, painted, clear - deny, _sources)
    for node in reversed(nodes):
        if node in clear - deny and _only_feeds(node, painted) and not _shrinks(node):
            painted.add(node)
    return {node for node in painted if not is_item(node) or node.args[0] in painted}


def _sources(node: Node) -> Iterable[Node]:
    """Inputs of the operator that are cast when it is converted."""
    as_written = read_as_written(node)
    return (source for source in node.all_input_nodes if source not in as_written)


def _users(node: Node) -> Iterable[Node]:
    return (user for user in node.users if node not in read_as_written(user))


def _joined(
    nodes: Iterable[Node], seeds: Set[Node], members: Set[Node], neighbours: Callable[[Node], Iterable[Node]]
) -> set[Node]:
    """The `seeds`, and the `members` that a chain of members connects to a seed. In `nodes` each node comes after its `neighbours`."""
    reached = set(seeds)
    for node in nodes:
        if node in members and any(neighbour in reached for neighbour in neighbours(node)):
            reached.add(node)
    return reached


def _only_feeds(node: Node, painted: Set[Node]) -> bool:
    """True if all readers of the node's values are painted, and read the values in half precision."""
    users = [user for user in node.users if not reads_form(user)]
    return bool(users) and all(user in painted and node not in read_as_written(user) for user in users)


def _shrinks(node: Node) -> bool:
    """True if the operator's result has fewer elements than its inputs; also if symbolic sizes leave this open."""
    read = sum(_elements(source.meta["val"]) for source in node.all_input_nodes)
    made = _elements(node.meta["val"])
    return made < read if isinstance(made, int) and isinstance(read, int) else not same_dim(made, read)


def _elements(value: object) -> int | torch.SymInt:
    """The number of elements of the floating-point tensors in a value."""
    if isinstance(value, list | tuple):
        return sum(map(_elements, value))
    return value.numel() if isinstance(value, torch.Tensor) and value.is_floating_point() else 0
