"""Linear layers, convolutions and attention below float32 beside PyTorch's own operators.

    python -m benchmarks.operators.low_precision
    python -m benchmarks.operators.low_precision --only linear --out low_precision.json

int8 is uint8 by int8, sums in int32, scaled to float32; bf16 is bfloat16 throughout. Ours is what `torch.compile(backend="hybrid")` makes of
the layer: Dynamo's guards are included, and for convolutions the way from NCHW to blocked channels and back, which a model goes once, not
once a layer. Theirs is oneDNN's operator with the weight packed ahead, called as it is; for attention ATen's
scaled_dot_product_attention, which has no bytes: theirs of int8 queries, keys and values is of the same numbers in float32. All run in turn in
one process, the lower quartile of the rounds counts; "float32" is our own layer in float32. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks import machine
from torch_hybrid_backend.measuring.measure import measure

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


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot product attention of one batch: `heads` heads of `width`, as many keys as there are `tokens`."""

    heads: int
    tokens: int
    width: int
    causal: bool = False

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.width}, {self.tokens} tokens{', causal' if self.causal else ''}"

    @property
    def operations(self) -> float:
        """Two for each multiply-add; of keys that can be seen."""
        return 4.0 * self.heads * self.tokens**2 * self.width / (2 if self.causal else 1)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


LINEAR = [
    Shape((1, 4096), 4096),
    Shape((128, 768), 768),
    Shape((128, 768), 3072),
    Shape((128, 3072), 768),
    Shape((1024, 768), 768),
    Shape((1024, 768), 3072),
    Shape((1024, 3072), 768),
    Shape((2048, 2048), 2048),
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
# BERT, ViT-B/16, GPT-2.
ATTENTION = [Attention(12, 128, 64), Attention(12, 512, 64), Attention(12, 197, 64), Attention(12, 1024, 64, True)]


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
            # The weight as a quantized layer has it: of 8 bits until the product.
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


_STEP = 0.02  # of quantized queries, keys and values


def attention_compared(shape: Attention, precision: str, budget_s: float) -> dict[str, float]:
    """Compare attention as `compared` does."""
    torch.manual_seed(0)
    # As projections leave them.
    wide = [torch.randn(1, shape.tokens, shape.heads, shape.width).transpose(1, 2) for _ in range(3)]
    torch.compiler.reset()
    plain = torch.compile(shape.__call__, backend="hybrid", dynamic=False)
    if precision == "int8":
        narrow = [(x / _STEP).round().clamp(-128, 127).to(torch.int8) for x in wide]

        def dequantized(*operands: torch.Tensor) -> torch.Tensor:
            scaled = (_STEP, 0, -128, 127, torch.int8)
            return shape(*(torch.ops.quantized_decomposed.dequantize_per_tensor(x, *scaled) for x in operands))

        of_bytes, same = torch.compile(dequantized, backend="hybrid", dynamic=False), [x * _STEP for x in narrow]
        name = f"{shape} int8"
        return timed(lambda: of_bytes(*narrow), lambda: shape(*same), lambda: plain(*wide), 1e-5, name, budget_s)
    half = [x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]) for x in wide]
    ours = torch.compile(shape.__call__, backend="hybrid", dynamic=False)
    return timed(lambda: ours(*half), lambda: shape(*half), lambda: plain(*wide), 0.02, str(shape), budget_s)


def timed(ours: Call, theirs: Call, plain: Call, limit: float, name: str, budget_s: float) -> dict[str, float]:
    """Microseconds of one call of each side. Raises AssertionError where the first two differ by more than `limit` of the largest."""
    result, other = (torch.as_tensor(side()).double() for side in (ours, theirs))
    assert (result - other).abs().max() <= limit * other.abs().max(), name
    sides: dict[str, Call] = {"ours": ours, "theirs": theirs, "float32": plain}
    timings = measure(list(sides.values()), budget_s)
    return {side: timing.low_us for side, timing in zip(sides, timings, strict=True)}


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
    limit = 1e-6 if precision == "int8" else 0.02
    return timed(lambda: ours(x), theirs, lambda: plain(wide), limit, f"{shape} {precision}", budget_s)


def main() -> None:
    """Every shape in int8 and in bf16, attention in fp16 too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["linear", "conv", "attention"], help="one kind of layer")
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds for each shape and precision")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    import torch.ao.quantization.fx._decomposed  # the operators of quantized graphs

    rows = []
    layers: dict[str, Sequence[Shape | Attention]] = {"linear": LINEAR, "conv": CONVOLUTIONS, "attention": ATTENTION}
    shapes = [shape for kind, each in layers.items() if arguments.only in (None, kind) for shape in each]
    print(f"{'layer':36} {'precision':9} {'ours':>9} {'theirs':>9} {'float32':>9}  us   ours GOP/s   theirs / ours")
    with torch.no_grad():
        for shape in shapes:
            for precision in ("int8", "bf16") if isinstance(shape, Shape) else ("int8", "bf16", "fp16"):
                if isinstance(shape, Shape):
                    took = compared(shape, precision, arguments.budget_s)
                else:
                    took = attention_compared(shape, precision, arguments.budget_s)
                speed, ratio = shape.operations / took["ours"] * 1e-3, took["theirs"] / took["ours"]
                shown = " ".join(f"{took[name]:9.1f}" for name in ("ours", "theirs", "float32"))
                print(f"{shape!s:36} {precision:9} {shown} {speed:17.0f} {ratio:15.2f}", flush=True)
                rows.append({"layer": str(shape), "precision": precision, "us": took})
    for precision in sorted({str(row["precision"]) for row in rows}):
        ratios = [row["us"]["theirs"] / row["us"]["ours"] for row in rows if row["precision"] == precision]  # type: ignore[index]
        print(f"{precision}: theirs / ours, geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": machine.describe(), "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode(False):
        main()
