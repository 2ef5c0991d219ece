"""What was converted, counted."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.graph.source import with_module_call
from torch_hybrid_backend.passes.precision.conversion import conversion, mark_sites, quantised_by_itself


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


def test_sites_are_named_as_their_modules(captured) -> None:
    """In the order of their calls; each call of a module begins anew, and what is no call of a layer has no name."""
    subject = captured(lambda x: torch.softmax(x @ x, 0) @ x @ x.neg(), torch.randn(4, 4))
    nodes = {node.name: node for node in subject.gm.graph.nodes}
    for name, call in (("mm", "a.b"), ("mm_1", "a.b"), ("mm_2", "a.b@1")):
        with_module_call(nodes[name], call)
    mark_sites(subject.gm)
    assert {name: node.meta.get("site") for name, node in nodes.items() if "mm" in name} == {
        "mm": "a.b",
        "mm_1": "a.b#2",
        "mm_2": "a.b",
    }
    assert "site" not in nodes["neg"].meta


def test_graphs_that_quantise_themselves(captured) -> None:
    """What they leave in floating point has a code; attention is not quantised at all. Others have no counts."""
    from torch_hybrid_backend.graph.quantization import call, tensor, weight

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(tensor(call, x, -1.0, 1.0), weight(call, first.weight, 0), first.bias)
        y = second(y)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y)

    subject = captured(function, torch.rand(4, 8))
    found = quantised_by_itself(subject.gm, subject.ctx)
    assert found is not None
    assert (found.precision, found.error, found.converted) == ("as-written", None, (("int8", 1),))
    assert (found.casts, found.weight_casts) == (1, 1)
    assert [(layer.operator.split(".")[1], layer.code) for layer in found.left] == [
        ("addmm", Reason.EXCLUDED),
        ("_scaled_dot_product_flash_attention_for_cpu", Reason.UNSUPPORTED),
    ]
    plain = captured(second, torch.rand(4, 8))
    assert quantised_by_itself(plain.gm, plain.ctx) is None
