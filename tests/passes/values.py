"""A check of a graph's metadata, by running it on fake tensors: too slow for the product."""

from __future__ import annotations

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import PassError


def verify_values(gm: torch.fx.GraphModule) -> None:
    """Check that every operator's `meta["val"]` is what the operator returns for its arguments'; PassError names the first that differs."""
    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes]) or FakeTensorMode()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode:
            value = node.target(*args, **kwargs)
        known = node.meta["val"]
        if isinstance(value, torch.Tensor) and TensorSpec.of(value) != TensorSpec.of(known):
            raise PassError(
                f"node {node.name} yields {TensorSpec.of(value)}; its meta['val'] says {TensorSpec.of(known)}"
            )
