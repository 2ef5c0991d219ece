"""On which device a graph's operators run.

    x.relu()                       x on cuda:0                  cuda:0
    x * torch.tensor(2.0)          the number on the CPU        cuda:0: a kernel gets it by value
    x.to("cpu")                    reads one, writes another    None: no kernel's, a copy

A tensor of no dimensions on the CPU is a number to kernels of other devices, as it is to PyTorch's: read on the host in the call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.graph.schema import is_item


def device_of(node: Node) -> Device | None:
    """The device that the operator reads and writes, by `meta["val"]` of its arguments and results; None where it is not one alone.

    What makes no tensors of tensors (arithmetic on sizes) runs on the host. What picks one of several results runs with their operator.
    """
    while is_item(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    found = {tensor.device for tensor in _tensors(node.meta.get("val"))}
    makes_tensors = bool(found)
    for source in node.all_input_nodes:
        for tensor in _tensors(source.meta.get("val")):
            if tensor.device not in found and not (makes_tensors and _is_number(tensor)):
                found.add(tensor.device)
    devices = {Device.of(device) for device in found} or {CPU}
    return devices.pop() if len(devices) == 1 else None


def is_on_host(gm: torch.fx.GraphModule) -> bool:
    """True if every tensor of the graph lies on the CPU."""
    return all(tensor.device.type == "cpu" for node in gm.graph.nodes for tensor in _tensors(node.meta.get("val")))


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dim() == 0


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
