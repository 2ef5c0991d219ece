"""Constants that calls would read across memory are copied to the order in which they are read; nothing else changes."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.passes.cpu.contiguous_tables import contiguous_tables
from torch_hybrid_backend.passes.hoist import hoist

aten = torch.ops.aten


class Bias(torch.nn.Module):
    """T5's: rows of a table, seen as (heads, queries, keys)."""

    def __init__(self, change):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 3))
        self.register_buffer("bucket", torch.randint(0, 5, (4, 7)))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x, torch.nn.functional.embedding(self.bucket, self.table).permute(2, 0, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, bias: torch.where(x > 0, bias.unsqueeze(0), -1.0).contiguous().cumsum(-1),
        lambda x, bias: (x + bias).exp().reshape(2, 3, 28).cumsum(-1),
        lambda x, bias: (bias * x).clone(memory_format=torch.contiguous_format),
    ],
)
def test_copied_where_elementwise_operators_read(captured, change):
    """The copy is folded with the table: calls read it in order, and no operator of the call makes it."""
    subject = captured(Bias(change), torch.randn(2, 3, 4, 7))
    assert subject.apply(contiguous_tables, exact=True)
    hoisted = hoist(subject.gm, subject.ctx.constants)
    assert aten.clone.default in [node.target for node in hoisted.fold.graph.nodes]
    tables = [n.meta["val"] for n in hoisted.main.graph.nodes if n.op == "placeholder" and n.meta.get("constant")]
    assert tables
    assert all(table.is_contiguous() for table in tables)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, bias: (
            bias.unsqueeze(0).expand(2, 3, 4, 7) * 2
        ),  # depends on no input; and an output shows its strides
        lambda x, bias: (
            (bias * x[0, 0, 0, 0]).permute(1, 2, 0).view(28, 3).cumsum(0)
        ),  # a view that needs the order as it is
        lambda x, bias: bias * x[0, 0, 0, 0],  # an output's strides
        lambda x, bias: torch.cumsum(bias, -1) + x,  # not elementwise
    ],
)
def test_left_where_others_would_see_it(captured, change):
    """Strides that an output or a view shows stay, and so does what no elementwise operator reads."""
    subject = captured(Bias(change), torch.randn(2, 3, 4, 7))
    assert not subject.apply(contiguous_tables, exact=True)


def test_weights_are_not_copied(captured):
    """A transposed weight is the parameter's own memory: a copy would be a second one."""
    module = torch.nn.Linear(3, 5, bias=False)
    module.forward = lambda x: (module.weight.t() * x).exp().contiguous()
    assert not captured(module, torch.randn(3, 5)).apply(contiguous_tables, exact=True)
