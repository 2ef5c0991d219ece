"""Work of a region's kernels: their operators, floating-point operations and bytes, which profiles show beside times.

    conv -> add -> relu -> view -> pool     one kernel computes conv and relu, another pool
    conv, add, relu: of the first kernel    an operator inside a kernel belongs to the kernel of its readers
    bytes of the first kernel               input and weight of conv, the other operand of add, the result of relu

Each value counts once, however often a kernel reads it. Values that stay inside a kernel do not count. A view counts where it is read, with the
elements that it shows; a view that has a kernel of its own is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.precision import computes, precision_of
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.graph.source import module_call, source_line
from torch_hybrid_backend.partition.estimate import value_bytes
from torch_hybrid_backend.partition.flops import node_flops


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a kernel. The fields are those of `core.plan.KernelTime`."""

    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    source: str
    flops: int
    bytes: int
    precision: str


def kernel_work(graph: torch.fx.Graph, kernels: Sequence[AbstractSet[str]]) -> list[Work]:
    """Work of each of a region's kernels. `kernels`: for each one, the names of the nodes whose values it writes to or reads from memory."""
    places = _places(graph, kernels)
    return [
        _work([node for node, found in places.items() if kernel in found], names, kernels)
        for kernel, names in enumerate(kernels)
    ]


def eager_work(graph: torch.fx.Graph) -> Work:
    """Work of a region that PyTorch runs operator by operator. Each operator reads and writes memory."""
    operators = _operators(graph)
    works = kernel_work(graph, [{node.name} for node in operators if not _is_free(node)])
    (whole,) = kernel_work(graph, [{node.name for node in operators}])
    return replace(whole, bytes=sum(work.bytes for work in works))


def _places(graph: torch.fx.Graph, kernels: Sequence[AbstractSet[str]]) -> dict[Node, frozenset[int]]:
    """Kernels that compute each operator. An operator that no kernel names belongs to its readers' kernels, or else to its producers'."""
    operators = _operators(graph)
    places = {node: frozenset(k for k, names in enumerate(kernels) if node.name in names) for node in operators}
    none: frozenset[int] = frozenset()
    for node in reversed(operators):
        places[node] = places[node] or none.union(*(places.get(user, none) for user in node.users))
    for node in operators:
        places[node] = places[node] or none.union(*(places.get(source, none) for source in node.all_input_nodes))
    return places


def _operators(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _work(members: Sequence[Node], names: AbstractSet[str], kernels: Sequence[AbstractSet[str]]) -> Work:
    inside = set(members)
    # The work of an operator that several kernels compute together is divided among them.
    flops = {node: node_flops(node) // max(1, sum(node.name in each for each in kernels)) for node in members}
    read: dict[Node, int] = {}
    for node in members:
        for source in () if _is_free(node) and node.name not in names else node.all_input_nodes:
            value = _viewed(source)
            if _producer(value) not in inside:
                read[value] = max(read.get(value, 0), min(_bytes(source), _bytes(value)))
    made = [value for node in members if node.name in names for value in _values(node)]
    written = sum(_bytes(value) for value in made if any(reader not in inside for reader in _readers(value)))
    heaviest = sorted(members, key=lambda node: -flops[node])  # stable: in graph order where nothing is a product
    return Work(
        tuple(node.name for node in members),
        tuple(dict.fromkeys(filter(None, (module_call(node).partition("@")[0] for node in heaviest)))),
        next(filter(None, map(source_line, heaviest)), ""),
        sum(flops.values()),
        sum(read.values()) + written,
        next((precision_of(node) for node in heaviest if computes(node)), ""),
    )


def _is_free(node: Node) -> bool:
    """True if the node moves no data."""
    return is_view(node) or is_item(node)


def _viewed(node: Node) -> Node:
    """The value under a view, or under a chain of views."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _producer(value: Node) -> Node:
    source = value.args[0] if is_item(value) else value
    assert isinstance(source, Node)
    return source


def _values(node: Node) -> list[Node]:
    """The node itself; for a node with several results, the items that are read."""
    return [node] if isinstance(node.meta.get("val"), torch.Tensor) else [user for user in node.users if is_item(user)]


def _readers(node: Node) -> Iterator[Node]:
    """Yield the readers of the value and of its views."""
    for user in node.users:
        if user.op == "call_function" and _is_free(user):
            yield from _readers(user)
        else:
            yield user


def _bytes(node: Node) -> int:
    return value_bytes(node.meta.get("val"))
