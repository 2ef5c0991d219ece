"""Checks that a graph is legal between passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import PassError, failures
from torch_hybrid_backend.graph.schema import is_collective, is_mutating
from torch_hybrid_backend.graph.values import outputs_of, storage_root
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# The one mutation that a functional graph may hold: AOTAutograd's copy back into a mutated input, at the graph's end. (Values that a rank
# receives are written in place too, though no schema says so.)
ALLOWED_MUTATIONS = frozenset({aten.copy_.default})


@dataclass(frozen=True, slots=True)
class Contract:
    """Facts that no pass may change: the inputs, the form of the outputs, and which outputs share memory.

    `outputs[i]`: a tensor's spec and lazy bits, the text of a size expression, or a literal. `shared`: pairs of outputs that may share memory,
    and pairs (output, -1 - k) of an output that may share memory with placeholder k.
    """

    inputs: tuple[str, ...]
    outputs: tuple[object, ...]
    shared: frozenset[tuple[int, int]]
    values: tuple[object, ...] = field(compare=False)  # of the outputs, as traced

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> Contract:
        """The contract that the graph fulfils now."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        return Contract(
            tuple(node.name for node in placeholders),
            tuple(_describe(value) for value in outputs_of(gm)),
            _shared(gm, placeholders),
            tuple(value.meta.get("val") if isinstance(value, torch.fx.Node) else value for value in outputs_of(gm)),
        )


def _describe(value: Any) -> object:
    if not isinstance(value, torch.fx.Node):
        return value
    known = value.meta.get("val")
    if not isinstance(known, torch.Tensor) or known.layout is not torch.strided:
        return str(known)
    return TensorSpec.of(known), LazyBits.of(known)


def _is_same(before: object, after: object) -> bool:
    """True if two values are equal by what was assumed when they were traced: there a padded size may equal one that is called otherwise."""
    if isinstance(before, int | torch.SymInt) and isinstance(after, int | torch.SymInt):
        return statically_known_true(before == after)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dim() != after.dim():
        return False
    if {before.layout, after.layout} != {torch.strided} or LazyBits.of(before) != LazyBits.of(after):
        return False
    sizes = zip((*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True)
    is_like = (before.dtype, before.device) == (after.dtype, after.device)
    return is_like and all(statically_known_true(one == other) for one, other in sizes)


def _shared(gm: torch.fx.GraphModule, placeholders: Sequence[torch.fx.Node]) -> frozenset[tuple[int, int]]:
    input_number = {node: -1 - k for k, node in enumerate(placeholders)}
    residents: dict[torch.fx.Node, list[int]] = {}
    pairs: set[tuple[int, int]] = set()
    for k, value in enumerate(outputs_of(gm)):
        if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            root = storage_root(value)
            if root.op == "placeholder":
                pairs.add((k, input_number[root]))
            elif root.op == "get_attr":
                pairs.add((k, -1 - len(placeholders)))
            pairs.update((earlier, k) for earlier in residents.setdefault(root, []))
            residents[root].append(k)
    return frozenset(pairs)


def verify(gm: torch.fx.GraphModule, contract: Contract) -> None:
    """Check the graph's own rules and the contract.

    Raises PassError that names the broken rule: the graph is malformed; an operator lacks `meta["val"]`; an operator
    mutates; inputs were added, lost or reordered; an output changed in dtype, shape, strides, bits or value; outputs share
    memory that had their own.
    """
    try:
        gm.graph.lint()
    except failures(RuntimeError) as error:
        raise PassError(f"the graph is malformed: {error}") from error
    for node in gm.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and not _returns_nothing(node):
            raise PassError(f"node {node.name} ({node.target}) has no meta['val']; build nodes with rewrite.insert")
        if is_mutating(node) and node.target not in ALLOWED_MUTATIONS and not is_collective(node):
            raise PassError(
                f"node {node.name} ({node.target}) mutates its argument; only copy_, and what receives from other processes, may"
            )
    now = Contract.of(gm)
    if now.inputs != contract.inputs:
        raise PassError(f"the inputs changed from {contract.inputs} to {now.inputs}")
    if len(now.outputs) != len(contract.outputs):
        raise PassError(f"the number of outputs changed from {len(contract.outputs)} to {len(now.outputs)}")
    for position, (before, after) in enumerate(zip(contract.outputs, now.outputs, strict=True)):
        if before != after and not _is_same(contract.values[position], now.values[position]):
            raise PassError(f"output {position} changed from {before} to {after}")
    if now.shared - contract.shared:
        raise PassError(
            f"outputs share memory that did not before: {sorted(now.shared - contract.shared)} "
            "(pairs of output positions; -1 - k stands for input k, one past the last for a constant)"
        )


def _returns_nothing(node: torch.fx.Node) -> bool:
    """True if the operator returns nothing, as assertions do, or is a higher-order operator: these need no `meta["val"]`."""
    target = node.target
    if isinstance(target, OpOverload):
        return not target._schema.returns
    return True
