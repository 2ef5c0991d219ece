"""Equal expressions are computed once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch.nn import functional

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.passes.canonical.cse import cse
from torch_hybrid_backend.passes.context import PassContext


def test_equal_expressions_merge(captured):
    """The same operators of the same arguments, several deep, merge."""
    subject = captured(lambda x: (x.sin() + 1) * (x.sin() + 1), torch.randn(3))
    assert subject.apply(cse, exact=True)
    assert subject.operators() == {"sin.default": 1, "add.Tensor": 1, "mul.Tensor": 1}


def test_several_results_merge(captured):
    """Operators with several results merge with all their members."""
    subject = captured(lambda x: torch.var_mean(x, 0)[0] * torch.var_mean(x, 0)[1], torch.randn(3, 4))
    assert subject.apply(cse, exact=True)
    assert subject.operators()["var_mean.correction"] == 1


def test_unequal_scalars_differ(captured):
    """1 and 1.0 and True promote differently; 0.0 and -0.0 differ in sign."""
    subject = captured(lambda x: [x * 1, x * 1.0, x * True, x * 2.0 + 0.0, x * 2.0 + -0.0], torch.arange(3))
    subject.apply(cse, exact=True)
    assert subject.operators()["mul.Tensor"] == 4
    assert subject.operators()["add.Tensor"] == 2


def test_outputs_stay_apart(captured):
    """Two outputs of equal value keep memories of their own, through views too."""
    subject = captured(lambda x: (x + 1, x + 1, (x + 1).view(-1)), torch.randn(3, 2))
    subject.apply(cse, exact=True)
    assert len({out.untyped_storage().data_ptr() for out in subject.run()}) == 3


def test_random_operators_do_not_merge(captured):
    """Two dropouts drop different elements."""
    subject = captured(lambda x: functional.dropout(x, 0.5) + functional.dropout(x, 0.5), torch.randn(99))
    before = subject.operators()
    cse(subject.gm, subject.ctx)
    assert subject.operators()["native_dropout.default"] == before["native_dropout.default"] == 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_do_not_merge():
    """Two reductions of one tensor are two: the other ranks take part in both."""

    def program(x):
        c10d = torch.ops._c10d_functional
        first, second = (c10d.wait_tensor(c10d.all_reduce(x.sin(), "sum", "0")) for _ in range(2))
        return first + second

    gm = trace(program, torch.ones(3))
    assert cse(gm, PassContext())  # the two sines
    targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    reduced = ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert targets == ["aten.sin.default", *reduced, *reduced, "aten.add.Tensor"]
