"""Models that torchao quantized, compiled and beside eager: in a process of its own, for torchao registers operators and changes settings.

    python -m tests.ecosystem.torchao_models

writes what was found, as JSON, to stdout: for each of `MODELS` a `Figures`, or the text of what was raised.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

import torch_hybrid_backend

WAS_IMPORTED = "torchao" in sys.modules  # by the package itself


class Quantized(NamedTuple):
    """before: what `model(x)` was before quantization."""

    model: nn.Module
    x: torch.Tensor
    before: torch.Tensor


class Figures(TypedDict):
    """`quantization`: by how much eager's results differ from those before quantization; `difference`: ours from eager's; as shares, by norms.

    graphs: how many there are. operators: those that an engine of ours runs. in_eager: the others.
    """

    quantization: float
    difference: float
    graphs: int
    operators: list[str]
    in_eager: list[str]


class Net(nn.Module):
    """Convolutions with batch norm and a residual, pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.linear = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x) + x)
        return self.linear(nn.functional.max_pool2d(x, 4).flatten(1))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).float().norm() / b.float().norm())


def _figures(quantized: Quantized) -> Figures:
    model, x, before = quantized
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="hybrid")
    compiled(x)
    found = compiled(x)
    plans = torch_hybrid_backend.explain(model, x).plans
    nodes = [node for plan in plans for node in plan.nodes]
    return Figures(
        quantization=_relative(expected, before),
        difference=_relative(found, expected),
        graphs=len(plans),
        operators=sorted({node.operator for node in nodes if node.engine != "eager"}),
        in_eager=[node.operator for node in nodes if node.engine == "eager"],
    )


def _exported(*, is_dynamic: bool) -> Quantized:
    """Export, the quantizer for x86, and conversion."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model, x = Net().eval(), torch.randn(2, 3, 16, 16)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    return Quantized(convert_pt2e(prepared), x, model(x))


def _tensors(config: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Quantized:
    """Weights that are torchao's tensors."""
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval().to(dtype)
    x = torch.randn(40, 64, dtype=dtype)
    before = model(x)
    quantize_(model, config())
    return Quantized(model, x, before)


def _config(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchao import quantization

        return getattr(quantization, name)(**options)

    return make


def _rows_with_zero_points() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType

    return Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC)


def _groups_of_int4(*, rows_too: bool) -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if rows_too:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))


def _packed_int4() -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=32)


MODELS: Mapping[str, Callable[[], Quantized]] = {
    "pt2e": functools.partial(_exported, is_dynamic=False),
    "pt2e, dynamic": functools.partial(_exported, is_dynamic=True),
    "int8 weights": functools.partial(_tensors, _config("Int8WeightOnlyConfig")),
    "int8": functools.partial(_tensors, _config("Int8DynamicActivationInt8WeightConfig")),
    "int8, zero points": functools.partial(_tensors, _rows_with_zero_points),
    "int4 weights": functools.partial(_tensors, functools.partial(_groups_of_int4, rows_too=False)),
    "int4 weights, int8": functools.partial(_tensors, functools.partial(_groups_of_int4, rows_too=True)),
    "packed int4 weights": functools.partial(_tensors, _packed_int4, torch.bfloat16),
}


def main() -> None:
    found: dict[str, Figures | str] = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                found[name] = _figures(make())
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps({"was_imported": WAS_IMPORTED, "found": found}))


if __name__ == "__main__":
    main()
