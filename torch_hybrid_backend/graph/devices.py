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
from torch.utils._pytree import tree_leaves

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.graph.schema import is_item


def device_of(node: Node) -> Device | None:
    """The device that the operator reads and writes, by `meta["val"]` of its arguments and results; None where it is not one alone.

    What makes no tensors of tensors (arithmetic on sizes) runs on the host. What picks one of several results runs with their operator.
    """
    maker = node
    while is_item(maker) and isinstance(maker.args[0], Node):
        maker = maker.args[0]
    made = {Device.of(tensor.device) for tensor in _tensors(maker)}
    read = {
        Device.of(tensor.device)
        for source in maker.all_input_nodes
        for tensor in _tensors(source)
        if not (made and is_number(tensor))
    }
    devices = made | read or {CPU}
    return devices.pop() if len(devices) == 1 else None


def is_number(tensor: torch.Tensor) -> bool:
    """Whether kernels of any device take the (fake) tensor by value."""
    return tensor.dim() == 0 and Device.of(tensor.device).is_host


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))
