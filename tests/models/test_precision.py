"""The zoo in reduced precision: how many casts each model takes, and how near its results are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torch_hybrid_backend
from benchmarks.models import ZOO, tensors
from torch_hybrid_backend import backend
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.plan import Conversion
from torch_hybrid_backend.driver import precision_speed_check, prepared
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.partition.deviation import relative_error
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.pipeline import PASSES, run_passes
from torch_hybrid_backend.passes.precision.conversion import conversion

# Operators that compute, those of them that are converted to bfloat16, casts in a call, and casts of weights.
_COUNTS = {
    "resnet50": (44, 44, 2, 42),
    "mobilenet_v2": (151, 151, 2, 106),
    "efficientnet_b0": (52, 52, 2, 44),
    "convnext_tiny": (46, 46, 2, 45),
    "regnet_y": (73, 73, 2, 62),
    "vit_b16": (25, 25, 2, 22),
    "swin_tiny": (58, 58, 2, 37),
    "segformer_b0": (90, 90, 2, 75),
    "bert_base": (27, 21, 3, 18),
    "distilbert": (24, 18, 3, 16),
    "gpt2": (38, 35, 3, 17),
    "t5_small_encoder": (48, 33, 4, 11),
    "llama_small": (78, 71, 3, 19),
    "minilm": (67, 61, 3, 50),
    "lstm": (272, 270, 3, 10),
    "unet": (27, 27, 2, 26),
}
# The same for `int8` and `int8+bf16`: operators, those converted to each dtype, casts in a call (a value that several layers read is quantized
# once), and casts of weights. Attention's products are bfloat16's in the second.
_INTEGERS = {
    ("resnet50", "int8"): (96, {"int8": 21}, 17, 21),
    ("mobilenet_v2", "int8"): (362, {"int8": 53}, 53, 53),
    ("bert_base", "int8"): (63, {"int8": 9}, 9, 9),
    ("bert_base", "int8+bf16"): (63, {"int8": 9, "bfloat16": 6}, 19, 9),
    ("gpt2", "int8"): (74, {"int8": 9}, 9, 9),
    ("gpt2", "int8+bf16"): (74, {"int8": 9, "bfloat16": 6}, 19, 9),
    ("lstm", "int8"): (380, {"int8": 27}, 27, 5),
}

# By default those of each kind: all take half a minute.
_DEFAULT = ("resnet50", "bert_base", "gpt2", "lstm")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _DEFAULT else pytest.mark.full) for n in ZOO])
def test_casts(name: str) -> None:
    """A cast stands in front of the first layer and one behind the last; a few more where a mask's or a residual's values enter in float32."""
    counts = _conversion(name, "bf16")
    (converted,) = counts.converted
    assert converted[0] == "bfloat16"
    assert (counts.operators, converted[1], counts.casts, counts.weight_casts) == _COUNTS[name]
    assert counts.left == ()


@pytest.mark.parametrize(("name", "precision"), [pytest.param(*key, id="-".join(key)) for key in _INTEGERS])
def test_casts_to_integers(name: str, precision: str) -> None:
    """Every layer with weights is quantized, its weight in a cast that is made once."""
    counts = _conversion(name, precision)
    assert (counts.operators, dict(counts.converted), counts.casts, counts.weight_casts) == _INTEGERS[name, precision]


def _conversion(name: str, precision: str) -> Conversion:
    """Convert a model's small form by the passes."""
    found: list[Conversion] = []

    def convert(graph: CapturedGraph) -> Any:
        context = PassContext.of(graph, precision)
        run_passes(graph.graph_module, context, PASSES)
        reduced = prepared.reduce_precision(graph.graph_module, context)
        found.append(conversion(reduced.graph, context))
        return reduced.written

    entry = ZOO[name]
    kept = frozenset(lowering.table())
    compiled = torch.compile(
        entry.build("small"), backend=lambda gm, inputs: capture(gm, inputs, lambda g: _boxed(convert(g)), kept)
    )
    with torch.no_grad():
        compiled(*entry.inputs("small", batch=1))
    (counts,) = found
    return counts


def _boxed(module: torch.fx.GraphModule) -> Any:
    return lambda inputs: module(*inputs)


@pytest.mark.parametrize(
    "name",
    ["distilbert", "gpt2", *(pytest.param(name, marks=pytest.mark.full) for name in ("convnext_tiny", "minilm"))],
)
def test_results_are_within_the_tolerance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolutional network, encoders (MiniLM has trained weights) and GPT-2: compiled in bfloat16 they are within 0.02 of float64's results,
    in the first call and after weights have changed, and no layer had to return."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda precision: ())
    monkeypatch.setattr(
        precision_speed_check, "_rate", lambda: 1e-9
    )  # as if float32 were slower: such small models may gain nothing
    entry = ZOO[name]
    model, inputs = entry.build("small"), entry.inputs("small", batch=2)
    options = {"precision": "bf16"}
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, *inputs, options=options).plans
        assert plan.conversion is not None
        assert plan.conversion.left == ()
        assert plan.conversion.error is not None
        assert plan.conversion.error < 0.02
        assert all(region.engine == "tvm" and "bfloat16" in region.precision for region in plan.regions)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="hybrid", options=options)
        for seed in (1, 2):
            inputs = entry.inputs("small", batch=2, seed=seed)
            exact = copy.deepcopy(model).double()(*(v.double() if v.is_floating_point() else v for v in inputs))
            results = tensors(compiled(*inputs))
            assert [value.dtype for value in results] == [value.dtype for value in tensors(model(*inputs))]
            error = relative_error(tensors(exact), [value.double() for value in results])
            assert error is not None
            assert 1e-4 < error < 0.02
            for parameter in model.parameters():
                parameter.mul_(1.01)
