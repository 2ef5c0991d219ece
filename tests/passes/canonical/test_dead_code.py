"""Unused work goes, unless it has an effect."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.context import PassContext


def test_unused_goes(captured):
    """Unused operators and constants are dropped; placeholders stay."""
    subject = captured(lambda x: x + 1, torch.randn(3))
    (x,) = subject.gm.graph.find_nodes(op="placeholder")
    with subject.gm.graph.inserting_before(subject.gm.graph.output_node()):
        subject.gm.register_buffer("unused", torch.ones(3))
        constant = subject.gm.graph.get_attr("unused")
        constant.meta["val"] = x.meta["val"]
        for target in (torch.ops.aten.sin.default, torch.ops.aten.bernoulli.p):
            node = subject.gm.graph.call_function(target, (constant, *([0.5] if "bernoulli" in str(target) else [])))
            node.meta["val"] = x.meta["val"]
    assert subject.apply(dead_code, exact=True)
    assert subject.operators() == {"add.Tensor": 1, "bernoulli.p": 1}  # a later draw depends on an earlier one
    assert "unused" in dict(subject.gm.named_buffers())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_stay():
    """A reduction whose result nobody reads stays, with its wait: the other ranks take part in it."""

    def program(x):
        c10d = torch.ops._c10d_functional
        c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
        c10d.all_reduce(x.sin(), "sum", "0")
        return x.cos()

    gm = trace(program, torch.ones(3))
    before = len(gm.graph.nodes)
    assert not dead_code(gm, PassContext())
    assert len(gm.graph.nodes) == before
