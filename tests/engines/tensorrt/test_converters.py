"""This package's own converters: their nodes, and the networks that they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.regions_for_tests import builds_bytes, built, region

pytestmark = pytest.mark.tensorrt

aten = torch.ops.aten
Q = torch.ops.quantized_decomposed
FP8 = torch.float8_e4m3fn


def test_they_are_asked_about_values_of_8_bits_alone() -> None:
    """Casts between wide dtypes are torch_tensorrt's. Its registry, which is global to the process, is not changed."""
    from torch_hybrid_backend.engines.tensorrt.adapter import DYNAMO_ATEN_CONVERTERS, converters_of
    from torch_hybrid_backend.engines.tensorrt.converters import converter_of

    def function(x: torch.Tensor) -> Any:
        narrow = Q.quantize_per_tensor(x, 0.5, 0, -128, 127, torch.int8)
        wide = Q.dequantize_per_tensor(narrow, 0.5, 0, -128, 127, torch.int8)
        return narrow.to(torch.float16), x.to(torch.float16), x.clamp(-448, 448).to(FP8), wide

    graph = make_fx(function, tracing_mode="fake")(torch.ones(4))
    ours = {node.name: converter_of(node) is not None for node in graph.graph.nodes if node.op == "call_function"}
    assert ours == {
        "quantize_per_tensor": True,
        "dequantize_per_tensor": True,
        "_to_copy": True,
        "_to_copy_1": False,
        "clamp": False,
        "_to_copy_2": True,
    }
    assert all(converters_of(node).found for node in graph.graph.nodes if node.op == "call_function")
    assert not any("quantized_decomposed" in str(target) for target in DYNAMO_ATEN_CONVERTERS)


def test_copies_of_inputs_counts_and_gathers_are_ours_where_sizes_are_unknown() -> None:
    """For other inputs torch_tensorrt's converters are right."""
    from torch_hybrid_backend.engines.tensorrt.converters import converter_of

    def function(x: torch.Tensor) -> Any:
        ours = x.half(), x.clone(), torch.arange(0, x.shape[0], 1), x.gather(0, torch.zeros(1, 5, dtype=torch.int64))
        return *ours, (x + 1).half(), (x + 1).clone()

    for mode, expected in (("symbolic", [True] * 4 + [False] * 2), ("fake", [False] * 6)):
        graph = make_fx(function, tracing_mode=mode)(torch.ones(4, 5))
        asked = (aten._to_copy.default, aten.clone.default, aten.arange.start_step, aten.gather.default)
        assert [converter_of(node) is not None for node in graph.graph.nodes if node.target in asked] == expected


@builds_bytes
def test_layers_have_the_types_that_the_graph_says() -> None:
    """8-bit values enter and leave engines, channels are dequantized to half types, and many scales stay apart."""

    def function(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> Any:
        narrow = [Q.quantize_per_tensor(x, 0.01 * (i + 1), 0, -128, 127, torch.int8) for i in range(3)]
        channels = Q.dequantize_per_channel(w, s, None, 1, -127, 127, torch.int8, out_dtype=torch.float16)
        return *narrow, x.clamp(-448, 448).to(FP8), channels

    given = (torch.ones(4, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(8))
    made = region(function, *given)
    assert (
        sorted(spec.dtype for spec in made.outputs if spec is not None) == ["float16", "float8_e4m3fn"] + ["int8"] * 3
    )
    engine = built(made)
    assert len(engine.outputs) == 5
    written = " ".join(layer.split("->")[-1] for layer in engine.layers)
    assert written.count("Int8") == 3
    assert "FP8" in written
    assert "Half" in written
