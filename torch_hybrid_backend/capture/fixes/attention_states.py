"""The state of random numbers that CUDA's attention gives its gradient, which reads it only where there is dropout.

Without dropout it would be saved for the backward graph all the same: the forward operator's results would be read, and no engine could take it
that does not make them. The gradient gets tensors that nothing has written instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten

_GRADIENTS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
_STATES = ("philox_seed", "philox_offset")


def without_attention_states(
    joint: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    **options: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """A partitioner of joint graphs: `partition`, after the joint graph has been edited in place."""
    drop_attention_states(joint)
    return partition(joint, inputs, **options)


def drop_attention_states(joint: torch.fx.GraphModule) -> None:
    """Edits a graph in place where attention's gradient is given a state that it does not read."""
    graph = joint.graph
    changed = False
    for target in _GRADIENTS:
        names = [argument.name for argument in target._schema.arguments]
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[names.index("dropout_p")] != 0:
                continue
            for position in map(names.index, _STATES):
                state = node.args[position]
                if not isinstance(state, torch.fx.Node) or state.target is aten.empty.memory_format:
                    continue
                value = state.meta["val"]
                with graph.inserting_before(node):
                    empty = graph.call_function(
                        aten.empty.memory_format,
                        (list(value.shape),),
                        {"dtype": value.dtype, "device": value.device, "pin_memory": False},
                    )
                empty.meta["val"] = value
                node.update_arg(position, empty)
                changed = True
    if changed:
        joint.recompile()
