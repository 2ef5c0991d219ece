"""Cost of each layer of a graph in a call, with the casts around it, and the least cost in float32.

    conv 80 us, relu fused      conv: 80         operators after a layer count for that layer
    amax 20, quantize 10        next conv: 30    casts and quantizations count for the layer that reads them
    conv + conv 60              by their flops   the time of a kernel of several layers is divided among them

Times are those of an engine's kernels in their places among the others (`CompiledRegion.operator_us`). So operands lie in the caches where they
lie in real calls, and layouts are those of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.partition.flops import node_flops

aten = torch.ops.aten

Parts = Iterable[tuple[frozenset[str], float]]

# Multiply-adds of a direct convolution over those of Winograd F(2x2, 3x3). Larger tiles save more multiply-adds, but less time
# (docs/performance.md).
_WINOGRAD_GAIN = 2.25
# Best speedup of a float32 product by AMX tiles (bf16 split) over one by float32 instructions (ADR 98).
_TILES_GAIN = 2.25
_PRODUCT_SIZE = 2048  # large enough for the processor's full rate, on a server's cores too


def layer_us(
    graph: torch.fx.Graph, layers: Collection[str], written: Collection[str], parts: Parts
) -> dict[str, float]:
    """Microseconds of each of the `layers` whose kernels are among the `parts`.

    `written`: names of the nodes of the graph as written. The other nodes are casts, quantizations and the operators that compute scales.
    """
    owners = _owners(graph, layers, written)
    flops = {node.name: node_flops(node) for node in graph.nodes if node.name in layers}
    spent: dict[str, float] = {}
    for names, us in parts:
        shared = sorted(names.intersection(layers)) or sorted({owners[name] for name in names if name in owners})
        total = sum(flops[name] for name in shared)
        for name in shared:
            share = flops[name] / total if total else 1 / len(shared)
            spent[name] = spent.get(name, 0.0) + share * us
    return spent


def _owners(graph: torch.fx.Graph, layers: Collection[str], written: Collection[str]) -> dict[str, str]:
    """Node -> the layer for which the node's time counts: the last layer before it, or for a cast the first layer after it."""
    nodes = list(graph.nodes)
    place = {node.name: position for position, node in enumerate(nodes)}

    def owners(
        order: Sequence[Node], neighbours: Callable[[Node], Iterable[Node]], best: Callable[..., str]
    ) -> dict[str, str]:
        owner: dict[str, str] = {}
        for node in order:
            near = [owner[other.name] for other in neighbours(node) if other.name in owner]
            if node.name in layers:
                owner[node.name] = node.name
            elif near:
                owner[node.name] = best(near, key=place.__getitem__)
        return owner

    before = owners(nodes, lambda node: node.all_input_nodes, max)
    behind = owners(nodes[::-1], lambda node: node.users, min)
    return {**behind, **before, **{name: owner for name, owner in behind.items() if name not in written}}


def least_us(graph: torch.fx.Graph, flops_per_us: float, *, has_tiles: bool) -> float:
    """The least microseconds of the graph's products in float32, by any algorithm.

    `flops_per_us`: rate of a large product by float32 instructions. `has_tiles`: true if AMX may compute the products.
    """
    gain = _TILES_GAIN if has_tiles else 1.0
    flops = sum(node_flops(node) / (_WINOGRAD_GAIN if _has_window(node) else 1.0) for node in graph.nodes)
    return flops / (flops_per_us * gain)


def _has_window(node: Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    weight: Any = node.args[1]
    return any(size != 1 for size in weight.meta["val"].shape[2:])


def float32_rate(microseconds: Callable[[Callable[[], object]], float]) -> float:
    """Floating-point operations per microsecond of a large float32 product in PyTorch. `microseconds`: times a call."""
    a, b = (torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.float32, device="cpu") for _ in range(2))
    result = torch.empty_like(a)
    with torch.no_grad():
        return 2 * _PRODUCT_SIZE**3 / microseconds(lambda: torch.mm(a, b, out=result))


def worth_mixing(reduced: Mapping[str, float], written: Mapping[str, float], least_gain: float) -> frozenset[str]:
    """The layers that take longer in reduced precision than as written, and so had better stay as written. Empty if mixing gains too little.

    `reduced`, `written`: microseconds by layer. The gain is measured against the faster of the two graphs that have all layers in one form.
    """
    both = reduced.keys() & written.keys()
    slow = frozenset(name for name in both if written[name] < (1 - least_gain) * reduced[name])
    mixed = sum(min(reduced[name], written[name]) for name in both)
    unmixed = min(sum(times[name] for name in both) for times in (reduced, written))
    return slow if mixed < (1 - least_gain) * unmixed else frozenset()
