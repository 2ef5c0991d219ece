"""A linear layer by weights alone, for any number of rows: ours in each precision, in turn in one process.

    python -m benchmarks.weights_alone
    python -m benchmarks.weights_alone --rows 1 4 128 --inputs 3072 --outputs 768 --activation-bits 16 --seconds 5

Medians of a call in microseconds, and billions of multiply-adds a second. `exact`: weights of 8 bits that a graph dequantizes itself, so that
rows keep all their digits; under `int8-weights` and `int4-weights` they keep `--activation-bits`. `error`: relative root mean square against
the product of the same weights in float64. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from torch_hybrid_backend.bench.peers import add_peers_folder
from torch_hybrid_backend.core.precision import ACTIVATION_BITS
from torch_hybrid_backend.measuring.measure import measure

_SIDES = ("as-written", "exact", "int8-weights", "int4-weights")


class Dequantized(nn.Module):
    """A linear layer whose weight lies in 8 bits, with a scale for each output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scales = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("q", (layer.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.q.float() * self.scales)


def _compiled(side: str, layer: nn.Linear, activation_bits: int = 32) -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    if side == "exact":
        return torch.compile(Dequantized(layer), backend="hybrid", dynamic=False)
    options = {"precision": side, "precision_tolerance": 1.0, "activation_bits": activation_bits}
    return torch.compile(layer, backend="hybrid", dynamic=False, options=options)


def _rounded(side: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight that a side multiplies by, in float64."""
    if side == "as-written":
        return weight.double()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    identity = torch.eye(weight.shape[1])
    # A first call answers by eager, which dequantizes the weight.
    return _compiled(side, layer)(identity).T.double()


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_alone", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 128, 512])
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--activation-bits", type=int, choices=ACTIVATION_BITS, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each number of rows")
    arguments = parser.parse_args()
    add_peers_folder()
    torch.manual_seed(0)
    layer = nn.Linear(arguments.inputs, arguments.outputs, bias=False).eval()
    weights = {side: _rounded(side, layer.weight.detach()) for side in _SIDES}
    for rows in arguments.rows:
        x = torch.randn(rows, arguments.inputs)
        sides = {side: _compiled(side, layer, arguments.activation_bits) for side in _SIDES}
        for run in sides.values():
            run(x)  # a first call answers by eager
        found = {side: run(x) for side, run in sides.items()}
        timings = measure([partial(run, x) for run in sides.values()], arguments.seconds)
        for (side, result), timing in zip(found.items(), timings, strict=True):
            want = x.double() @ weights[side].T
            error = float((result.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
            rate = rows * arguments.inputs * arguments.outputs / timing.median_us / 1e3
            print(f"{rows:5} rows  {side:14} {timing.median_us:9.1f} us {rate:8.1f} G/s  error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
