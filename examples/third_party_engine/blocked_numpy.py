"""An engine of one file: chains of elementwise operators, computed by NumPy block by block.

PyTorch writes the result of each operator to memory and reads it back for the next. Here a block of all operands goes through the whole chain
before the next block is looked at, so that intermediate results stay in the processor's cache. It pays where tensors are larger than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.services import Services

BLOCK = 16384  # elements: 64 KiB of each operand
MIN_ELEMENTS = 4 * BLOCK
aten = torch.ops.aten
_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_UNARY = {"neg": np.negative, "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt, "abs": np.abs}
OPERATORS: dict[object, Callable[..., Any]] = {
    **{getattr(aten, name).Tensor: function for name, function in _BINARY.items()},
    **{getattr(aten, name).default: function for name, function in _UNARY.items()},
}


class BlockedRegion(CompiledRegionBase):
    """A compiled region. Threads may call it at once: all that a call writes is its own."""

    def __init__(self, region: Region) -> None:
        graph = region.graph_module.graph
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._operators = [node for node in graph.nodes if node.op == "call_function"]
        self._outputs = graph.output_node().all_input_nodes
        self._shapes = [tuple(map(int, spec.shape)) for spec in region.outputs if spec is not None]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = [torch.empty(shape) for shape in self._shapes]
        tensors = zip((*self._inputs, *self._outputs), (*inputs, *results), strict=True)
        whole = {node: tensor.detach().view(-1).numpy() for node, tensor in tensors}
        with np.errstate(all="ignore"):  # what PyTorch computes without a word
            for start in range(0, results[0].numel(), BLOCK):
                values = {node: array[start : start + BLOCK] for node, array in whole.items()}
                for node in self._operators:
                    operands = [values[value] if isinstance(value, Node) else value for value in node.args]
                    values[node] = OPERATORS[node.target](*operands, out=values.get(node))
        return results


class BlockedNumpy(EngineBase):
    """float32 on the CPU, contiguous, all of one size."""

    name = "blocked_numpy"
    keeps_deadline = True  # there is next to nothing to compile

    def version(self, device: Device) -> str:
        return f"1.0 numpy {np.__version__}"

    def describe(self) -> Sequence[tuple[str, str]]:
        return (("numpy", np.__version__), ("blocks", f"{BLOCK} elements"))

    def supports(self, node: Node) -> Verdict:
        if node.target not in OPERATORS:
            return Refused(Reason.UNKNOWN_OPERATOR, f"{node.target} is not in blocked_numpy's table")
        if node.kwargs or any(value.op == "get_attr" for value in node.all_input_nodes):
            return Refused(Reason.ARGUMENT, "blocked_numpy takes no alpha, and no constants of the graph's own")
        tensors = [node.meta["val"], *(value.meta["val"] for value in node.all_input_nodes)]
        if any(not isinstance(t, torch.Tensor) or t.dtype is not torch.float32 for t in tensors):
            return Refused(Reason.DTYPE, "blocked_numpy computes with float32 alone")
        if any(t.shape != tensors[0].shape or not t.is_contiguous() for t in tensors):
            return Refused(Reason.LAYOUT, "blocked_numpy takes contiguous tensors of one shape")
        return Supported()

    def accepts(self, region: Region) -> Verdict:
        values = [*(value.spec for value in region.inputs), *region.outputs]
        specs = [spec for spec in values if spec is not None and spec.is_static]
        if len(specs) < len(values):
            return Refused(Reason.SYMBOLIC_SHAPE, "blocked_numpy needs sizes that are known when it compiles")
        sizes = {math.prod(map(int, spec.shape)) for spec in specs}
        if len(sizes) > 1 or min(sizes) < MIN_ELEMENTS:
            return Refused(
                Reason.TOO_SMALL, f"blocked_numpy takes tensors of one size, of {MIN_ELEMENTS} elements or more"
            )
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [BlockedRegion(region) for region in regions]


def engine(config: Config, services: Services) -> BlockedNumpy:
    """Return the engine: the entry point names this function."""
    return BlockedNumpy()
