"""Evaluated batch norm disappears into what comes before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.fold_batch_norm import fold_batch_norm
from torch_hybrid_backend.passes.canonical.remove_no_ops import remove_no_ops
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.hoist import hoist


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


FOLDABLE = {
    "conv": (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), (2, 3, 6, 6), "convolution.default"),
    "conv_bias": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6), "convolution.default"),
    "grouped": (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), (2, 4, 6, 6), "convolution.default"),
    "conv1d": (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (2, 3, 6), "convolution.default"),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6), "convolution.default"),
    "no_affine": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)),
        (2, 3, 6, 6),
        "convolution.default",
    ),
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3), "addmm.default"),
    "linear_no_bias": (nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)), (2, 3), "addmm.default"),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_folds_into(captured, name):
    """After folding and hoisting, the call holds the convolution or product alone."""
    model, shape, anchor = FOLDABLE[name]
    subject = captured(with_statistics(model), torch.randn(shape))
    assert subject.apply(dead_code, remove_no_ops, fold_batch_norm)
    assert subject.operators(hoist(subject.gm, subject.ctx.constants).main) == {anchor: 1}


def test_dynamic_batch(captured):
    """A symbolic batch size does not hinder folding."""
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    subject = captured(model, torch.randn(3, 3, 6, 6), dynamic=True)
    assert subject.apply(fold_batch_norm)
    assert subject.operators(hoist(subject.gm, subject.ctx.constants).main)["convolution.default"] == 1
    assert "mul.Tensor" not in subject.operators(hoist(subject.gm, subject.ctx.constants).main)


class TwoUsers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.norm(y) + y.sin()


def test_second_user_of_the_convolution(captured):
    """A convolution that others read stays; the batch norm becomes one multiply and one add."""
    subject = captured(with_statistics(TwoUsers()), torch.randn(2, 3, 6, 6))
    assert subject.apply(fold_batch_norm)
    main = subject.operators(hoist(subject.gm, subject.ctx.constants).main)
    assert main == {"convolution.default": 1, "mul.Tensor": 1, "add.Tensor": 2, "sin.default": 1}


def test_parameters_that_are_not_constant(captured):
    """Without constant parameters (training) the weights are not rewritten."""
    subject = captured(FOLDABLE["conv"][0].eval(), torch.randn(2, 3, 6, 6))
    subject.ctx = PassContext("forward")
    assert subject.apply(fold_batch_norm)
    (convolution,) = subject.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert convolution.args[1].op == "placeholder"


def test_bfloat16(captured):
    """Half-type models fold with their statistics combined in float32; the output keeps its type."""
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).bfloat16()
    subject = captured(model, torch.randn(2, 3, 6, 6).bfloat16())
    assert fold_batch_norm(subject.gm, subject.ctx)
    (after,), (before,) = subject.run(), subject.before
    torch.testing.assert_close(after, before, rtol=3e-2, atol=3e-2)
