"""Embedding bags that kernels take, and those that eager keeps."""

from __future__ import annotations

import operator

import torch

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten
TAKES = Abilities(segments=True)


def _verdict(mode: int, abilities: Abilities = TAKES, read: int = 0) -> Verdict:
    """The verdict on bags of three offsets, of which result number `read` is used."""
    graph = torch.fx.Graph()
    values = torch.zeros(10, 4), torch.zeros(7, dtype=torch.int64), torch.tensor([0, 2, 5])
    given = [graph.placeholder(f"x{n}") for n in range(3)]
    for node, value in zip(given, values, strict=True):
        node.meta["val"] = value
    bags = graph.call_function(aten._embedding_bag.default, (*given, False, mode))
    bags.meta["val"] = aten._embedding_bag(*values, False, mode)
    result = graph.call_function(operator.getitem, (bags, read))
    graph.output(result)
    return supports(bags, abilities)


def test_verdicts() -> None:
    """Sums and means are taken; maxima, and what the backward reads, are not."""
    assert _verdict(0) == Supported()
    assert _verdict(1) == Supported()
    for verdict in (_verdict(2), _verdict(0, read=1), _verdict(0, Abilities())):
        assert isinstance(verdict, Refused)
        assert verdict.code is Reason.ARGUMENT
