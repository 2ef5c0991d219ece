"""What was converted, counted."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.passes.precision.conversion import conversion


def test_counts(captured) -> None:
    """Operators that compute in a call, how many carry which precision, casts of the call and of weights, and the layers that stayed, with
    their reasons: the pass's own and those that it was given."""
    linear = nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = linear(x.bfloat16().float())
        return (y.sin() @ y.cos().t()) @ linear.weight.bfloat16().float().neg()

    subject = captured(function, torch.randn(4, 4))
    nodes = {node.name: node for node in subject.gm.graph.nodes}
    nodes["addmm"].meta["precision"], nodes["sin"].meta["precision"] = "int8", "bfloat16"
    others = ["mm", "mm_1"]
    subject.gm.meta["as_written"] = {
        others[0]: Refused(Reason.UNCALIBRATED, "no ranges"),
        "gone": Refused(Reason.SLOWER, ""),
    }
    given = {
        others[1]: Refused(Reason.ACCURACY, "off"),
        "addmm": Refused(Reason.EXCLUDED, "it is converted all the same"),
    }
    context = dataclasses.replace(subject.ctx, precision="int8+bf16", as_written=given)

    found = conversion(subject.gm, context)
    assert isinstance(found, Conversion)
    assert (found.precision, found.tolerance, found.error) == ("int8+bf16", 0.1, None)
    assert found.operators == 5  # the layer, sine and cosine, and products; not what is computed of weights alone
    assert sorted(found.converted) == [("bfloat16", 1), ("int8", 1)]
    assert (found.casts, found.weight_casts) == (2, 2)
    assert [(layer.name, layer.code) for layer in found.left] == [
        (others[0], Reason.UNCALIBRATED),
        (others[1], Reason.ACCURACY),
    ]
    assert all(isinstance(layer, Unconverted) and "test_conversion.py" in layer.source for layer in found.left)
    assert conversion(subject.gm, context, 0.5).tolerance == 0.5
