"""The passes in their order, with the devices that they are for and the reason for their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.fx

from torch_hybrid_backend.errors import PassError, failures
from torch_hybrid_backend.passes.canonical.cse import cse
from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.fold_batch_norm import fold_batch_norm
from torch_hybrid_backend.passes.canonical.fold_constants import fold_constants
from torch_hybrid_backend.passes.canonical.index_to_views import index_to_views
from torch_hybrid_backend.passes.canonical.quantized_pairs import quantized_pairs
from torch_hybrid_backend.passes.canonical.remove_no_ops import remove_no_ops
from torch_hybrid_backend.passes.canonical.simplify import simplify
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.cpu.contiguous_tables import contiguous_tables
from torch_hybrid_backend.passes.cpu.dilated_convolutions import dilated_convolutions
from torch_hybrid_backend.passes.cpu.merge_convolutions import merge_convolutions
from torch_hybrid_backend.passes.cpu.merge_siblings import merge_siblings
from torch_hybrid_backend.passes.cpu.quantize_layers import quantize_layers
from torch_hybrid_backend.passes.cpu.quantize_weights import quantize_weights
from torch_hybrid_backend.passes.cpu.resample_last import resample_last
from torch_hybrid_backend.passes.cpu.transposed_convolutions import transposed_convolutions
from torch_hybrid_backend.passes.cpu.unpack_int4 import unpack_int4
from torch_hybrid_backend.passes.cpu.volume_convolutions import volume_convolutions
from torch_hybrid_backend.passes.precision.half import half
from torch_hybrid_backend.passes.verify import Contract, verify

log = logging.getLogger(__name__)

# A pass edits the graph in place and returns true if it changed anything.
Pass = Callable[[torch.fx.GraphModule, PassContext], bool]

# The device types for which a pass exists; empty: all.
Devices = frozenset[str]
_ALL: Devices = frozenset()
_CPU: Devices = frozenset({"cpu"})

PASSES: tuple[tuple[Pass, Devices, str], ...] = (
    (dead_code, _ALL, "first: with unused results of decompositions values would seem to have several users"),
    (
        remove_no_ops,
        _ALL,
        "before patterns are matched: aliases and casts to the same type hide a convolution from its batch norm",
    ),
    (fold_batch_norm, _ALL, "before simplify and cse, which may give the convolution a second user"),
    (resample_last, _CPU, "after fold_batch_norm, which looks for the convolution before a batch norm"),
    (
        transposed_convolutions,
        _CPU,
        "after fold_batch_norm, which scales their weights; before fold_constants and cse, as it rewrites constant weights",
    ),
    (volume_convolutions, _CPU, "after fold_batch_norm, as transposed_convolutions"),
    (
        dilated_convolutions,
        _CPU,
        "after fold_batch_norm, as transposed_convolutions; after volume_convolutions, whose results may be dilated",
    ),
    (unpack_int4, _CPU, "before fold_constants and cse, which simplify the operators that it inserts"),
    (simplify, _ALL, "before fold_constants, which then evaluates less"),
    (fold_constants, _ALL, "before cse: equal constants become one"),
    (index_to_views, _ALL, "after fold_constants, which computes the indices; before cse: equal views become one"),
    (cse, _ALL, "after all passes that make expressions equal"),
    (quantized_pairs, _ALL, "after cse, which merges equal quantizations of one value by several layers"),
    (remove_no_ops, _ALL, "again: copies of folded constants, views that simplify brought together"),
    (merge_siblings, _CPU, "after cse, which makes equal views of one tensor one input"),
    (merge_convolutions, _CPU, "after fold_batch_norm, which joins convolutions with their activations, and cse"),
    (contiguous_tables, _CPU, "after remove_no_ops, which would remove its copies of constants"),
    (dead_code, _ALL, "last: removes operators that the other passes left unused"),
)

# Passes that convert an inference graph to another precision. They run after PASSES, which combine weights in float32. Their results are
# compared with the graph before them.
PRECISION_PASSES: tuple[tuple[Pass, Devices, str], ...] = (
    (
        quantize_layers,
        _CPU,
        "after PASSES, which compute with weights as written; before half, which leaves quantized layers alone",
    ),
    (half, _CPU, "before quantize_weights, which recognizes its casts"),
    (quantize_weights, _CPU, "after PASSES, which merge weights, so that merged weights are quantized whole"),
    (remove_no_ops, _ALL, "after half, whose casts may undo those of the graph"),
    (dead_code, _ALL, "last: removes operators that the other passes left unused"),
)


def run_passes(
    gm: torch.fx.GraphModule, ctx: PassContext, passes: Sequence[tuple[Pass, Devices, str]] = PASSES
) -> torch.fx.GraphModule:
    """Run the passes over the graph, in place, checking it after each one that changed it; returns the graph.

    Raises PassError, naming the pass and those before it, when a pass raises or breaks a rule of `verify`.
    """
    contract = Contract.of(gm)
    done: list[str] = []
    for graph_pass, devices, _reason in passes:
        name = graph_pass.__name__
        try:
            if graph_pass(gm, replace(ctx, devices=devices)):
                log.debug("%s changed the graph (now %d nodes)", name, len(gm.graph.nodes))
                verify(gm, contract)
        except failures(Exception) as error:  # raised again with the name of the pass
            before = ", ".join(done) or "none"
            raise PassError(f"pass {name} failed (passes before it: {before}): {error}") from error
        done.append(name)
    gm.recompile()
    return gm
