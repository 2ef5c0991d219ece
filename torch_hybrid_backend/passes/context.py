"""Facts that passes may know in addition to the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.fx

from torch_hybrid_backend.core.captured import CapturedGraph, GraphKind
from torch_hybrid_backend.core.precision import AS_WRITTEN, SYMMETRIC, WeightForm
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.graph.quantized import KeepsPacked, keeps_nothing
from torch_hybrid_backend.graph.values import constant_nodes


@dataclass(frozen=True, slots=True)
class PassContext:
    """Facts about one graph.

    `constants`: placeholders whose contents rarely change, so that work on them alone may be moved out of the call.
    Empty for training graphs: there every step changes the parameters.

    `fold_limit_bytes`: the largest tensor that constant folding may keep in memory for the life of the graph.

    `precision`: the precision of the graph, one of `core.precision.PRECISIONS`; training graphs stay as written.

    `weights`: form of the weights under `int8-weights` and `int4-weights`.

    `weight_bits`: 7 or 8, of weights that `int8` multiplies by quantized activations on the CPU.

    `as_written`: node name of a layer that stays as written in any precision -> the reason.

    `keeps_packed`: True for weights from a codebook that kernels read packed; others are made ahead.

    `devices`: types of the devices whose operators the pass may rewrite, from its entry in the pipeline; empty: all devices.
    """

    kind: GraphKind = "inference"
    constants: frozenset[str] = frozenset()
    # A causal mask of 4,096 x 4,096 booleans. Computing a larger tensor in each call costs less than keeping it in memory.
    fold_limit_bytes: int = 16 << 20
    devices: frozenset[str] = frozenset()
    precision: str = AS_WRITTEN
    weights: WeightForm = SYMMETRIC
    weight_bits: int = 8
    as_written: Mapping[str, Refused] = field(default_factory=dict)
    keeps_packed: KeepsPacked = keeps_nothing

    @staticmethod
    def of(
        captured: CapturedGraph,
        precision: str = AS_WRITTEN,
        weights: WeightForm = SYMMETRIC,
        weight_bits: int = 8,
        keeps_packed: KeepsPacked = keeps_nothing,
    ) -> PassContext:
        """The context for a captured graph."""
        if captured.kind != "inference":
            return PassContext(captured.kind, keeps_packed=keeps_packed)
        return PassContext(
            captured.kind,
            captured.static_inputs,
            precision=precision,
            weights=weights,
            weight_bits=weight_bits,
            keeps_packed=keeps_packed,
        )

    def constant_nodes(self, gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
        """Nodes that `hoist` computes ahead: they depend on constants alone."""
        return constant_nodes(gm, self.constants, self.keeps_packed)

    def may_rewrite(self, node: torch.fx.Node) -> bool:
        """True if the operator and all its tensors are on one of the `devices`."""
        device = device_of(node)
        return not self.devices or (device is not None and device.type in self.devices)
