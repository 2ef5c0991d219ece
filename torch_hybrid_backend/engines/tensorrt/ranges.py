"""Ranges of sizes for which an engine is built (TensorRT: optimization profile)."""

from __future__ import annotations

import sys

import torch

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.tensorrt.build import Range
from torch_hybrid_backend.sizes.size import Dim, Symbol, symbols
from torch_hybrid_backend.torch_private import tree_leaves

# An engine serves sizes up to this multiple of the power of two above the example, within the size's own range. Larger sizes run elsewhere.
# A wider range costs memory and speed. The cost was not measured, as there was no GPU.
MAX_GROWTH = 8


def ranges_of(region: Region) -> dict[str, Range]:
    """Symbol name -> range for which the region's engine is built. The range is the symbol's own, ended at `MAX_GROWTH` times the power of two
    above the example."""
    found: dict[str, Range] = {}
    for each in symbols_of(region):
        low, high = _known_range(region, each.name)
        most = min(high, MAX_GROWTH * (1 << max(0, each.hint - 1).bit_length()))
        found[each.name] = Range(max(1, low), min(max(each.hint, low, 1), most), most)
    return found


def symbols_of(region: Region) -> list[Symbol]:
    """The size symbols that the region's inputs depend on."""
    sizes: list[Dim] = []
    for each in region.inputs:
        if each.spec is not None:
            sizes += [*each.spec.shape, *each.spec.strides]
        elif each.size is not None:
            sizes.append(each.size)
    return symbols(sizes)


def _known_range(region: Region, name: str) -> tuple[int, int]:
    """The range of a size symbol, as the graph's capture recorded it."""
    for node in region.graph_module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    for each in size.node.expr.free_symbols:
                        if str(each) == name:
                            bounds = size.node.shape_env.bound_sympy(each)
                            return tuple(int(b) if b.is_Integer else sys.maxsize for b in (bounds.lower, bounds.upper))  # type: ignore[return-value]
    return 1, sys.maxsize
