"""Products of two tensors that calls bring, neither of them a weight: eager and ours, in turn in one process, precision by precision.

    python -m benchmarks.two_activations
    python -m benchmarks.two_activations --sizes 12x512x512x64 1x1024x1024x1024 --seconds 5

Medians of a call in microseconds. `--sizes`: batch, rows, k and columns. int8: a module of `quantize(exclude_kinds=())`, which rounds both
tensors in the call; eager is not run so. The whole of ours is one region on the TVM engine, whatever is faster: by default PyTorch's operator
runs where it is. `error`: relative root mean square against float64. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from torch_hybrid_backend import quantize
from torch_hybrid_backend.measuring.measure import measure

_ALWAYS_OURS = {"placement": "estimate", "engines": "tvm", "strict": True, "verify": "off"}
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Multiply(nn.Module):
    """A product of two tensors."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(a, b)


def _compiled(module: nn.Module) -> Product:
    return torch.compile(module, backend="hybrid", dynamic=False, options=_ALWAYS_OURS)


def _sizes(text: str) -> tuple[int, int, int, int]:
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(
            f"{text}: four numbers are needed, as in 12x512x512x64: batch, rows, k, columns"
        )
    return sizes


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_activations", description=__doc__.splitlines()[0])
    default = ["12x128x64x128", "12x512x512x64", "1x1024x1024x1024", "96x197x64x197"]
    parser.add_argument("--sizes", type=_sizes, nargs="+", default=[_sizes(text) for text in default])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size")
    arguments = parser.parse_args()
    for batch, rows, k, columns in arguments.sizes:
        torch.manual_seed(0)
        torch._dynamo.reset()
        a, b = torch.randn(batch, rows, k), torch.randn(batch, k, columns)
        halves, module = (a.bfloat16(), b.bfloat16()), Multiply().eval()
        in_bytes = quantize(module, [(a, b)], calibration="naive", exclude_kinds=())
        ours = _compiled(module)
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "float32 eager": partial(module, a, b),
            "float32": partial(ours, a, b),
            "bfloat16 eager": partial(module, *halves),
            "bfloat16": partial(ours, *halves),
            "int8": partial(_compiled(in_bytes), a, b),
        }
        for run in sides.values():
            run()  # a first call answers by eager
        found = {side: run() for side, run in sides.items()}
        want = a.double() @ b.double()
        for (side, result), timing in zip(found.items(), measure(list(sides.values()), arguments.seconds), strict=True):
            error = float((result.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
            print(
                f"{batch:3}x{rows}x{k}x{columns:<6} {side:15} {timing.median_us:9.1f} us  error {error:.1e}", flush=True
            )


if __name__ == "__main__":
    main()
