"""Facts that passes may know beside the graph itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.fx

from torch_hybrid_backend.core.captured import CapturedGraph, GraphKind
from torch_hybrid_backend.core.precision import AS_WRITTEN, SYMMETRIC, WeightForm
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.graph.devices import device_of


@dataclass(frozen=True, slots=True)
class PassContext:
    """`constants`: placeholders whose contents rarely change, so that work on them alone may be moved out of the call.
    Empty for training graphs: there every step changes the parameters.

    `fold_limit_bytes`: the largest tensor that constant folding may keep in memory for the life of the graph.

    `precision`: what the graph is to be computed in, one of `core.precision.PRECISIONS`; training graphs are as written.

    `weights`: how `int8-weights` and `int4-weights` keep them.

    `weight_bits`: 7 or 8, of weights that `int8` multiplies by quantized activations on the CPU.

    `as_written`: layers, by their node's name, that stay as written whatever the precision, and why.

    `devices`: types of the devices whose operators the pass that gets this may rewrite, by its entry in the pipeline; empty: all.
    """

    kind: GraphKind = "inference"
    constants: frozenset[str] = frozenset()
    # A causal mask of 4,096 x 4,096 booleans; beyond, computing costs less than the memory.
    fold_limit_bytes: int = 16 << 20
    devices: frozenset[str] = frozenset()
    precision: str = AS_WRITTEN
    weights: WeightForm = SYMMETRIC
    weight_bits: int = 8
    as_written: Mapping[str, Refused] = field(default_factory=dict)

    @staticmethod
    def of(
        captured: CapturedGraph, precision: str = AS_WRITTEN, weights: WeightForm = SYMMETRIC, weight_bits: int = 8
    ) -> PassContext:
        """The context for a captured graph."""
        if captured.kind != "inference":
            return PassContext(captured.kind)
        constants = captured.static_inputs
        return PassContext(captured.kind, constants, precision=precision, weights=weights, weight_bits=weight_bits)

    def may_rewrite(self, node: torch.fx.Node) -> bool:
        """True if the operator runs on one of the `devices`, all its tensors with it."""
        device = device_of(node)
        return not self.devices or (device is not None and device.type in self.devices)
