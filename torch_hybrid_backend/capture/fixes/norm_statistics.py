"""Normalisations of half precision with float32 weights, as autocast makes them: their statistics are float32.

ATen's CPU kernels return mean and deviation in the weights' dtype; their metadata say the input's (torch 2.13:
`torch._refs.native_layer_norm` and its like). AOTAutograd traced the rest of the graph, and the backward graph, by the metadata. So the
metadata are set right here, and a cast to what they said is put behind.
"""

from __future__ import annotations

from operator import getitem

import torch
import torch.fx

aten = torch.ops.aten

_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)
_HALVES = (torch.bfloat16, torch.float16)


def correct_statistics(graph_module: torch.fx.GraphModule) -> None:
    """Edits the graph in place where a normalisation mixes dtypes on the CPU."""
    graph = graph_module.graph
    nodes = [node for target in _NORMS for node in graph.find_nodes(op="call_function", target=target)]
    mixed = [node for node in nodes if _is_mixed(node)]
    for node in mixed:
        told = node.meta["val"]
        node.meta["val"] = (told[0], *(statistic.to(torch.float32) for statistic in told[1:]))
        for item in [user for user in node.users if user.target is getitem and user.args[1] != 0]:
            told = item.meta["val"]
            users = list(item.users)
            if told.dtype not in _HALVES or not users:
                continue
            item.meta["val"] = told.to(torch.float32)
            with graph.inserting_after(item):
                cast = graph.call_function(aten._to_copy.default, (item,), {"dtype": told.dtype})
            cast.meta.update(item.meta, val=told)
            for user in users:
                user.replace_input_with(item, cast)
    if mixed:
        graph_module.recompile()


def _is_mixed(node: torch.fx.Node) -> bool:
    values = [argument.meta.get("val") for argument in node.args if isinstance(argument, torch.fx.Node)]
    x, *weights = [value for value in values if isinstance(value, torch.Tensor)]
    return x.device.type == "cpu" and x.dtype in _HALVES and any(w.dtype is torch.float32 for w in weights)
