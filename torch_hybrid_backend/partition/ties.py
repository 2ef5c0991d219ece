"""Ties: integer and boolean results that differ from eager's only because floating-point values before them are rounded differently.

A comparison of two nearly equal numbers may come out either way, and the position of a maximum may be that of a number nearly as large.
Training saves such results in the forward graph: masks of ReLU, positions of maximum pooling.

    x = convolution(...); mask = x <= 0: where x is 1e-8 in eager, and -1e-8 on an engine, the masks differ, and both are right
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.node import map_arg

from torch_hybrid_backend.graph.eager_graph import TracedRun
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import outputs_of

aten = torch.ops.aten

_COMPARISONS = frozenset(
    overload
    for packet in (aten.le, aten.lt, aten.ge, aten.gt, aten.eq, aten.ne)
    for overload in (packet.Tensor, packet.Scalar)
)
_LOGICAL = frozenset(
    {
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.logical_not.default,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
        aten.bitwise_not.default,
    }
)
_COPIES = frozenset({aten.clone.default, aten.constant_pad_nd.default})
# Operators whose positions are in the flattened last dimensions of their input, with the number of those dimensions.
_POOLINGS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
# Operators whose positions are along the dimension that is their first argument.
_ALONG = frozenset({aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default})
# Numbers are nearly equal if they differ by this share of what is usual in their tensor. Float32 results differ from eager's by some 1e-6 of
# it in each layer, Winograd's the most. Half types: two units in the last place.
_NEAR = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# At most so many elements may differ: a few, as overlapping windows share a maximum, or this share over that by which numbers are near.
_SHARE, _FEW = 10, 10


def differs_at_ties(
    module: torch.fx.GraphModule, inputs: Sequence[object], result: torch.Tensor, reference: torch.Tensor, position: int
) -> bool:
    """True if an integer or boolean `result` differs from eager's `reference` in few elements, and in each because of a tie.

    module: the region's graph, which is run in eager once more, on `inputs`. position: of the result among its outputs.
    """
    output = outputs_of(module)[position]
    assert isinstance(output, Node)
    different = result != reference
    run = _TieFinder(module, output, result, reference)
    run.run(*inputs)
    if run.doubtful is None:
        return False
    most = max(_FEW, int(_SHARE * run.nears[output] * result.numel()))
    return int(different.sum()) <= most and not bool((different & ~run.doubtful).any())


class _TieFinder(TracedRun):
    """Runs a graph in eager, and finds which elements of one output are `doubtful`: decided by numbers that are nearly equal.

    doubtful: a mask of the output's shape; None if the output is not computed by comparisons or is no position of an extreme.
    nears: of each mask, the largest share of what is usual by which numbers counted as nearly equal.
    """

    def __init__(
        self, module: torch.fx.GraphModule, output: Node, result: torch.Tensor, reference: torch.Tensor
    ) -> None:
        super().__init__(module)
        self._output = output
        self._results = result, reference
        self._masks: dict[Node, torch.Tensor] = {}
        maker = output.args[0] if output.target is operator.getitem and output.args[1] == 1 else output
        self._maker = maker if isinstance(maker, Node) else output
        self._x: torch.Tensor | None = None  # the numbers whose positions are the output
        self.nears: dict[Node, float] = {}

    @property
    def doubtful(self) -> torch.Tensor | None:
        return self._masks.get(self._output)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n is self._maker and n.target in {*_POOLINGS, *_ALONG}:
            x = self._value(n.args[0])
            self._x = x if x.dtype in _NEAR else None
        mask = self._mask(n)
        if mask is not None:
            self._masks[n] = mask
            own = [_NEAR[x.dtype] for x in self._compared(n) if x.dtype in _NEAR]
            self.nears[n] = max([*own, *(self.nears.get(each, 0.0) for each in n.all_input_nodes)], default=0.0)
        return value

    def _mask(self, n: Node) -> torch.Tensor | None:
        if n.op != "call_function":
            return None
        if n.target in _COMPARISONS:
            return self._nearly_equal(*map(self._value, n.args[:2]))
        before = [self._masks[each] for each in n.all_input_nodes if each in self._masks]
        if n.target in _LOGICAL and before:
            mask = before[0]
            for each in before[1:]:
                mask = mask | each
            return mask
        if len(before) == 1 and n.args[0] in self._masks and (is_view(n) or n.target in _COPIES):
            others, named = map_arg((n.args[1:], n.kwargs), self._value)
            again: torch.Tensor = n.target(before[0], *others, **named)  # type: ignore[operator]
            return again
        return self._of_positions() if n is self._output else None

    def _of_positions(self) -> torch.Tensor | None:
        """Mask of the positions whose numbers are nearly those at eager's positions."""
        x, maker, (result, reference) = self._x, self._maker, self._results
        if x is None:
            return None
        numbers, dim, shape = x.flatten(), 0, [1]
        if maker.target in _POOLINGS:
            rank = _POOLINGS[maker.target]
            numbers, dim, shape = x.flatten(-rank), -1, [*x.shape[:-rank], -1]
        elif len(maker.args) > 1 and isinstance(maker.args[1], int):
            numbers, dim = x, maker.args[1]
            shape = [*x.shape[:dim], 1, *x.shape[dim:][1:]]
        if result.numel() and not 0 <= int(result.min()) <= int(result.max()) < numbers.shape[dim]:
            return None
        a, b = (numbers.gather(dim, each.reshape(shape)) for each in (result, reference))
        mask = self._nearly_equal(a, b, of=x)
        return None if mask is None else mask.reshape(result.shape)

    def _compared(self, n: Node) -> list[torch.Tensor]:
        """The tensors of numbers that a node's mask was found by."""
        found = [*map(self._value, n.args[:2])] if n.target in _COMPARISONS else []
        if n is self._output and self._x is not None:
            found.append(self._x)
        return [each for each in found if isinstance(each, torch.Tensor)]

    def _value(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, Node) else argument

    def _nearly_equal(self, a: Any, b: Any, of: torch.Tensor | None = None) -> torch.Tensor | None:
        a, b = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for value in (a, b))
        scale = of if of is not None else a
        near = _NEAR.get(scale.dtype)
        if near is None:
            return None
        mask: torch.Tensor = (a == b) | ((a - b).abs() <= near * _usual(scale))
        return mask


def _usual(x: torch.Tensor) -> float:
    """Return about the root mean square of the numbers of a tensor, without zeros, infinities and the huge numbers that masks are made of.

    That is three times the lower quartile of their magnitudes, which it is for normal ones.
    """
    magnitudes = x.detach().double().abs().flatten()
    magnitudes = magnitudes[magnitudes.isfinite() & (magnitudes > 0)]
    return 3 * magnitudes.kthvalue(-(-magnitudes.numel() // 4)).values.item() if magnitudes.numel() else 0.0
