"""Insertion and replacement of nodes that keep metadata true."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_hybrid_backend.core.tensor_spec import dim
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import output_nodes, returned_roots, storage_root
from torch_hybrid_backend.sizes.size import Dim, Function, Symbol, as_size, symbols
from torch_hybrid_backend.torch_private import FakeTensorMode, detect_fake_mode

# Metadata that says where in the user's code a node came from. A rewritten node inherits it. `passes.precision.conversion` sets "site".
ORIGIN_KEYS = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "seq_nr",
    "from_node",
    "site",
)


def fake_value(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], graph: torch.fx.Graph | None = None
) -> Any:
    """Result of `target` on the arguments' `meta["val"]`, as fake tensors. If no argument has a fake mode, the graph's mode is used."""
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = detect_fake_mode((fake_args, fake_kwargs))
    if mode is None and graph is not None:
        mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    mode = mode or FakeTensorMode()
    with mode:
        return target(*fake_args, **fake_kwargs)


def insert(
    before: torch.fx.Node,
    target: Callable[..., Any],
    *args: Any,
    origin: torch.fx.Node | None = None,
    **kwargs: Any,
) -> torch.fx.Node:
    """Insert an operator in front of `before`, with `meta["val"]` and the source line of `origin` (default: `before`). Returns the node."""
    graph = before.graph
    value = fake_value(target, args, kwargs, graph)
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    source = origin or before
    node.meta = {key: source.meta[key] for key in ORIGIN_KEYS if key in source.meta}
    node.meta["val"] = value
    return node


def follows_from_inputs(graph: torch.fx.Graph, sizes: Iterable[int | torch.SymInt]) -> bool:
    """True if `size_argument` can compute the sizes."""
    given = _size_sources(graph)
    return all(as_size(symbol) in given for symbol in symbols(map(dim, sizes)))


def size_argument(before: torch.fx.Node, value: int | torch.SymInt) -> int | torch.fx.Node:
    """A size as an argument of operators in front of `before`: a number, or a node that computes the size from those of the graph's inputs,
    from which it must follow (`follows_from_inputs`)."""
    sources = _size_sources(before.graph)

    def computed(size: Dim) -> int | torch.fx.Node:
        if isinstance(size, int):
            return size
        if size in sources:
            source, position = sources[size]
            return source if position is None else insert(before, torch.ops.aten.sym_size.int, source, position)
        terms: list[int | torch.fx.Node] = []
        for monomial, coefficient in size.terms.items():
            factors = [atom_of(atom) for atom, power in monomial for _ in range(power)]
            terms.append(joined(operator.mul, [*factors, *([coefficient] if coefficient != 1 or not factors else [])]))
        return joined(operator.add, terms)

    def atom_of(atom: Symbol | Function) -> int | torch.fx.Node:
        if isinstance(atom, Symbol):
            return computed(as_size(atom))
        return joined(_FUNCTIONS[atom.name], [computed(atom.left), computed(atom.right)])

    def joined(operation: Callable[..., Any], parts: list[int | torch.fx.Node]) -> int | torch.fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = insert(before, operation, total, part)
        return total

    return computed(dim(value))


def _size_sources(graph: torch.fx.Graph) -> dict[Dim, tuple[torch.fx.Node, int | None]]:
    """Sizes that inputs of a graph have: the input, and the number of its dimension, None if the input is the size itself."""
    found: dict[Dim, tuple[torch.fx.Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        given = node.meta.get("val")
        if isinstance(given, torch.SymInt):
            found[dim(given)] = node, None
        for position, size in enumerate(given.shape if isinstance(given, torch.Tensor) else ()):
            found.setdefault(dim(size), (node, position))
    return found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


def same_dim(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True if two sizes are equal for certain, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def same_dims(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(same_dim(x, y) for x, y in zip(a, b, strict=True))


def same_spec(a: Any, b: Any) -> bool:
    """True if two values have equal dtype, device, shape and strides (and neither is a lazily conjugated or negated
    view)."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and same_dims(a.shape, b.shape)
        and same_dims(a.stride(), b.stride())
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    )


def may_replace(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node) -> bool:
    """True if `by`, equal in value to `node`, may replace `node` without a difference that the user could see.

    False if dtype, shape or strides would change; if two outputs would become one object, or an output would become an input's object; or if
    outputs that have their own memory would share memory with each other, with an input or with a constant.
    """
    if not same_spec(node.meta.get("val"), by.meta.get("val")):
        return False
    returned = set(output_nodes(gm))
    if node in returned and (by in returned or by.op in ("placeholder", "get_attr")):
        return False
    old_root, new_root = storage_root(node), storage_root(by)
    if old_root is new_root or is_view(node):
        # A view has the same root as its base. `by` is one of its ancestors, or an equal view.
        return old_root is new_root
    roots = returned_roots(gm)
    return old_root not in roots or (new_root.op == "call_function" and new_root not in roots)


def replace(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node) -> bool:
    """Replace `node` by `by` and drop `node`, if `may_replace` allows it. Returns true if it did."""
    if not may_replace(gm, node, by):
        return False
    node.replace_all_uses_with(by)
    gm.graph.erase_node(node)
    return True


def replace_by_new(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node, after: torch.fx.Node) -> bool:
    """`replace` by nodes that were inserted between `after` and `node`. If `by` may not replace `node`, the inserted nodes are erased."""
    if replace(gm, node, by):
        return True
    while node.prev is not after:
        gm.graph.erase_node(node.prev)
    return False
