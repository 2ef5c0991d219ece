"""Merging of convolutions of one input that differ only in output channels. Their results are slices of the channels of one convolution.

    a = relu(conv(x, Wa, ba)); b = relu(conv(x, Wb, bb))   ->   y = relu(conv(x, cat(Wa, Wb), cat(ba, bb))); a = y[:, :n]; b = y[:, n:]

The branches of Inception blocks begin so. One kernel starts its threads once, and reads the input for more output channels at a time. Later
convolutions read their slices in place. The concatenated weights depend on parameters alone, so hoisting computes them outside the call.
Source: Szegedy et al., "Rethinking the Inception Architecture", 2016; Li et al., "Automatic Horizontal Fusion for GPU Kernels", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx

from torch_hybrid_backend.graph.schema import is_random
from torch_hybrid_backend.graph.values import has_mutation, returned_roots
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.cpu.merge_siblings import feeds_epilogue, move_before, values_with
from torch_hybrid_backend.passes.rewrite import insert
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

# The most channels in a block of the CPU's NCHWc layouts: AVX-512 has 16 float32 lanes. Slices at multiples of this number are whole blocks.
_CHANNELS_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class _Branch:
    """A convolution and the chain of elementwise operators that follow it, each the only reader of the one before."""

    convolution: Node
    epilogue: tuple[Node, ...]

    @property
    def last(self) -> Node:
        return self.epilogue[-1]

    def key(self) -> tuple[object, ...]:
        """Key that is equal for branches that one convolution can compute."""
        x, weight, bias, *geometry = self.convolution.args
        applied = [(node.target, node.args[1:], tuple(node.kwargs.items())) for node in self.epilogue]
        return x, tuple(weight.meta["val"].shape[2:]), bias is None, repr(geometry), repr(applied)  # type: ignore[union-attr]


def merge_convolutions(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Merge convolutions of one input with constant weights, if their activations are equal.

    These are left alone: outputs of the graph, as they would share memory; grouped and transposed convolutions; output channels that are no
    multiple of a block, whose slices would be copied; results that another elementwise operator reads, which is fused with the convolution
    already; results whose readers would see other strides.
    """
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    returned = returned_roots(gm)
    siblings: dict[tuple[object, ...], list[_Branch]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        branch = _Branch(node, _epilogue(node))
        kept = any(own in returned for own in (node, *branch.epilogue))
        if not kept and ctx.may_rewrite(node) and _is_candidate(branch, constant):
            siblings.setdefault(branch.key(), []).append(branch)
    merged = [_merge(gm, group) for group in siblings.values() if len(group) > 1]
    return any(merged)


def _epilogue(node: Node) -> tuple[Node, ...]:
    found: list[Node] = []
    while len(node.users) == 1:
        node = next(iter(node.users))
        target = node.target
        if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
            break
        others = [*node.args[1:], *node.kwargs.values()]
        if is_random(target) or any(isinstance(other, Node) for other in others):
            break
        found.append(node)
    return tuple(found)


def _is_candidate(branch: _Branch, constant: set[Node]) -> bool:
    x, weight, bias, _, _, _, transposed, _, groups = branch.convolution.args
    if not branch.epilogue or feeds_epilogue(branch.last) or transposed or groups != 1:
        return False
    if x in constant or weight not in constant or (bias is not None and bias not in constant):
        return False
    if weight.meta["val"].dim() != 4 or weight.meta["val"].shape[0] % _CHANNELS_TOGETHER:  # type: ignore[union-attr]
        return False
    operands = [node for node in (x, weight, bias, *branch.epilogue) if isinstance(node, Node)]
    return len({node.meta["val"].dtype for node in operands}) == 1


def _merge(gm: torch.fx.GraphModule, group: list[_Branch]) -> bool:
    """Replace the group by one convolution, unless a reader would see a difference. Returns true if it did."""
    first = group[0].convolution
    new: list[Node] = []
    arguments = list(first.args)
    for position in (1, 2):
        joined = [branch.convolution.args[position] for branch in group]
        if isinstance(joined[0], Node):
            for operand in joined:
                move_before(first, operand)  # type: ignore[arg-type]
            arguments[position] = insert(first, aten.cat.default, joined)
            new.append(arguments[position])  # type: ignore[arg-type]
    merged = insert(first, aten.convolution.default, *arguments, origin=first)
    new.append(merged)
    for node in group[0].epilogue:
        merged = insert(first, node.target, merged, *node.args[1:], origin=node, **node.kwargs)  # type: ignore[arg-type]
        new.append(merged)
    parts, start = [], 0
    for branch in group:
        end = start + branch.last.meta["val"].shape[1]
        parts.append(insert(first, aten.slice.Tensor, merged, 1, start, end, origin=branch.last))
        start = end
    lasts = [branch.last for branch in group]
    values = values_with(gm, dict(zip(lasts, (part.meta["val"] for part in parts), strict=True)))
    if values is None:
        for node in reversed([*new, *parts]):
            gm.graph.erase_node(node)
        return False
    for branch, part in zip(group, parts, strict=True):
        branch.last.replace_all_uses_with(part)
        for node in reversed((branch.convolution, *branch.epilogue)):
            gm.graph.erase_node(node)
    for node, value in values.items():
        node.meta["val"] = value
    return True
