"""Names of a graph's inputs in the user's code, from those that Dynamo gives its placeholders."""

from __future__ import annotations

import re

import torch.fx


def called(placeholder: str) -> str:
    """Name of an input: "input_ids" of "L_input_ids_", "layers.0.weight" of "L_self_modules_layers_modules_0_parameters_weight_"; ""
    where the name tells nothing, as that of a value which an earlier graph left."""
    found = re.fullmatch(r"[LG]_(.+?)_?", placeholder)
    name = found[1] if found else ""
    first, *others = re.split("_(?:modules|parameters|buffers)_", name)
    if re.search("_(?:parameters|buffers)_", name):
        return ".".join(others if first == "self" else [first, *others])
    return "" if re.fullmatch(r"stack\d+(_.*)?", name) else name.removeprefix("kwargs_")


def name_inputs(graph_module: torch.fx.GraphModule, dynamo: torch.nn.Module) -> None:
    """Put into `meta["called"]` of the inputs of AOTAutograd's graph what `dynamo`, which the graph was made of, calls them.

    Nothing is put there if `dynamo` is no graph, or if the numbers of inputs differ: AOTAutograd adds tokens, takes tensors apart, and leaves
    out what is given twice.
    """
    if not isinstance(dynamo, torch.fx.GraphModule):
        return
    given = dynamo.graph.find_nodes(op="placeholder")
    inputs = graph_module.graph.find_nodes(op="placeholder")
    if len(given) != len(inputs):
        return
    for node, source in zip(inputs, given, strict=True):
        if name := called(str(source.target)):
            node.meta["called"] = name
