"""Linear layers and convolutions below float32 beside oneDNN's.

    python -m benchmarks.operators.low_precision
    python -m benchmarks.operators.low_precision --only linear --out low_precision.json

int8 is uint8 by int8, sums in int32, scaled to float32; bf16 is bfloat16 throughout. Ours is what `torch.compile(backend="hybrid")` makes of
the layer: Dynamo's guards are included, and for convolutions the way from NCHW to blocked channels and back, which a model goes once, not
once a layer. oneDNN's is PyTorch's operator with the weight packed ahead, called as it is. All run in turn in one process, the lower
quartile of the rounds counts; "float32" is our own layer in float32. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks import machine
from torch_hybrid_backend.measure import measure

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer: (rows, inputs) or (images, inputs, height, width) to `outputs`; `kernel` 0 is linear."""

    x: tuple[int, ...]
    outputs: int
    kernel: int = 0
    stride: int = 1

    def __str__(self) -> str:
        window = f" {self.kernel}x{self.kernel} /{self.stride}" if self.kernel else ""
        return f"{'x'.join(map(str, self.x))} to {self.outputs}{window}"

    @property
    def operations(self) -> float:
        """Two for each multiply-add."""
        places = self.x[0] if not self.kernel else self.x[0] * math.prod(-(-n // self.stride) for n in self.x[2:])
        return 2.0 * places * self.x[1] * self.outputs * max(1, self.kernel) ** 2


LINEAR = [
    Shape((1, 4096), 4096),
    Shape((128, 768), 768),
    Shape((128, 768), 3072),
    Shape((128, 3072), 768),
    Shape((1024, 768), 768),
]
CONVOLUTIONS = [
    Shape((1, 64, 56, 56), 64, 1),
    Shape((1, 64, 56, 56), 64, 3),
    Shape((1, 128, 28, 28), 128, 3),
    Shape((1, 1024, 14, 14), 256, 1),
    Shape((1, 256, 14, 14), 256, 3),
    Shape((1, 512, 7, 7), 512, 3),
    Shape((1, 256, 56, 56), 512, 1, 2),
]


class Layer(nn.Module):
    """The layer in one precision: "int8", "bf16" or "float32"; its input is uint8, bfloat16 or float32."""

    def __init__(self, shape: Shape, precision: str) -> None:
        super().__init__()
        self.shape, self.is_int8 = shape, precision == "int8"
        window = (shape.kernel, shape.kernel) if shape.kernel else ()
        weight = torch.randint(-127, 128, (shape.outputs, shape.x[1], *window), dtype=torch.int8)
        if self.is_int8:
            self.register_buffer("weight", weight)
        else:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            self.register_buffer("weight", (weight.float() / 64).to(dtype))
        self.weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_int8 and not self.shape.kernel:
            return torch._int_mm(x, self.weight.t()).float()
        if not self.shape.kernel:
            return nn.functional.linear(x, self.weight)
        if self.is_int8:
            # The weight as a quantised layer has it: of 8 bits until the product.
            x, weight = (
                x.float(),
                torch.ops.quantized_decomposed.dequantize_per_tensor(self.weight, 1.0, 0, -128, 127, torch.int8),
            )
        else:
            weight = self.weight
        return nn.functional.conv2d(x, weight, None, self.shape.stride, self.shape.kernel // 2)


def onednn(shape: Shape, layer: Layer, x: torch.Tensor) -> Call:
    """oneDNN's, packed ahead, on the same numbers."""
    ones, zeros = torch.ones(shape.outputs), torch.zeros(shape.outputs, dtype=torch.int32)
    stride, padding = [shape.stride] * 2, [shape.kernel // 2] * 2
    if shape.kernel and layer.is_int8:
        image = x.contiguous(memory_format=torch.channels_last)
        packed = torch.ops.onednn.qconv_prepack(layer.weight, ones, 1.0, 0, stride, padding, [1, 1], 1, list(x.shape))
        return lambda: torch.ops.onednn.qconv_pointwise(
            image, 1.0, 0, packed, ones, zeros, None, stride, padding, [1, 1], 1, 1.0, 0, torch.float32, "none", [], ""
        )
    if shape.kernel:
        image = x.contiguous(memory_format=torch.channels_last)
        packed = torch.ops.mkldnn._reorder_convolution_weight(layer.weight, padding, stride, [1, 1], 1, list(x.shape))
        return lambda: torch.ops.mkldnn._convolution_pointwise(
            image, packed, None, padding, stride, [1, 1], 1, "none", [], ""
        )
    if layer.is_int8:
        packed = torch.ops.onednn.qlinear_prepack(layer.weight, list(x.shape))
        return lambda: torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 0, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, x.shape[0])
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def compared(shape: Shape, precision: str, budget_s: float) -> dict[str, float]:
    """Microseconds of one call of each side. Raises AssertionError where their results differ by more than their precision allows."""
    torch.manual_seed(0)
    layers = [Layer(shape, precision).eval(), Layer(shape, "float32").eval()]
    dtype = {"int8": torch.uint8, "bf16": torch.bfloat16}[precision]
    x = torch.randint(0, 256, shape.x).to(torch.uint8) if dtype == torch.uint8 else torch.randn(shape.x).to(dtype)
    wide = torch.randn(shape.x)
    torch.compiler.reset()
    ours, plain = (torch.compile(layer, backend="hybrid", dynamic=False) for layer in layers)
    theirs = onednn(shape, layers[0], x)
    result, other = ours(x).double(), torch.as_tensor(theirs()).double()
    limit = 1e-6 if precision == "int8" else 0.02
    assert (result - other).abs().max() <= limit * other.abs().max(), (str(shape), precision)
    sides: dict[str, Call] = {"ours": lambda: ours(x), "oneDNN": theirs, "float32": lambda: plain(wide)}
    timings = measure(list(sides.values()), budget_s)
    return {name: timing.low_us for name, timing in zip(sides, timings, strict=True)}


def main() -> None:
    """Every shape in int8 and in bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["linear", "conv"], help="one kind of layer")
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds for each shape and precision")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    import torch.ao.quantization.fx._decomposed  # the operators of quantised graphs

    rows = []
    shapes = [s for s in (*LINEAR, *CONVOLUTIONS) if arguments.only in (None, "conv" if s.kernel else "linear")]
    print(f"{'layer':36} {'precision':9} {'ours':>9} {'oneDNN':>9} {'float32':>9}  us   ours GOP/s   oneDNN / ours")
    with torch.no_grad():
        for shape in shapes:
            for precision in ("int8", "bf16"):
                took = compared(shape, precision, arguments.budget_s)
                speed, ratio = shape.operations / took["ours"] * 1e-3, took["oneDNN"] / took["ours"]
                shown = " ".join(f"{took[name]:9.1f}" for name in ("ours", "oneDNN", "float32"))
                print(f"{shape!s:36} {precision:9} {shown} {speed:17.0f} {ratio:15.2f}", flush=True)
                rows.append({"layer": str(shape), "precision": precision, "us": took})
    means = {p: [r["us"]["oneDNN"] / r["us"]["ours"] for r in rows if r["precision"] == p] for p in ("int8", "bf16")}  # type: ignore[index]
    for precision, ratios in means.items():
        print(f"{precision}: oneDNN / ours, geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": machine.describe(), "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode(False):
        main()
