"""Linear layers whose weights have 8 or 4 bits, of one row and more: ours beside PyTorch's operators and float32, and the bytes read a second.

    python -m benchmarks.quantized_weights
    python -m benchmarks.quantized_weights --rows 1 128 --layers 4096x4096 --out quantized_weights.json

A call runs several layers of one shape, so that weights come from memory. All sides run in turn in one process; outputs are compared with
float64 products of the dequantized weights first. `us` is one layer's; `GB/s` counts a weight once, with its scales (and zero points where
the side has them); `gain` is over our own float32. "hybrid clusters": weights that share 16 values, as `compress` makes them; "aten":
`_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`, in bfloat16 as torchao calls them, and in float32. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize

from benchmarks import machine
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.bench.peers.eager import packed_int4, packed_int8
from torch_hybrid_backend.compression.shared_weights import FOUR_BIT_CLUSTERS, SharedWeight
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.passes.cpu.quantize_weights import GROUP

aten = torch.ops.aten

LAYERS = ("4096x4096", "4096x11008", "2048x5632")  # inputs x outputs
# What the layers of a call read at least, by the side that reads least: more than caches hold.
_BYTES = 96 << 20
_TOLERANCES = {"float32": 1e-5, "int8": 0.02, "int4": 0.15, "bfloat16": 0.02}


@dataclass(frozen=True, slots=True)
class Record:
    """A side of one shape."""

    layer: str
    rows: int
    side: str
    us: float
    gbytes_per_s: float
    gain: float


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """`call` runs every layer and returns its outputs; `bytes`: read of a weight; `tolerance`: relative error of outputs at most."""

    name: str
    call: Callable[[], Sequence[torch.Tensor]]
    bytes: float
    tolerance: float


class _Layers(nn.Module):
    """Several linear layers, each of an input of its own: products of one input would be merged."""

    def __init__(self, k: int, n: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(count))

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def compare(layer: str, rows: int, budget_s: float) -> list[Record]:
    """The records of one shape. Raises AssertionError where an output is wrong."""
    torch.manual_seed(0)
    k, n = map(int, layer.split("x"))
    count = max(1, round(_BYTES / (k * n / 2)))
    model, inputs = _Layers(k, n, count).eval(), [torch.randn(rows, k) for _ in range(count)]
    with torch.no_grad():
        sides = [*_ours(model, inputs), *_peers(model, inputs)]
        for side in sides:
            for got, own, x in zip(side.call(), model.layers, inputs, strict=True):
                assert isinstance(own, nn.Linear)
                want = x.double() @ own.weight.double().t()
                error = float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
                assert error <= side.tolerance, f"{side.name} of {layer} is off by {error:.2g}"
        timings = measure([side.call for side in sides], budget_s)
    us = [timing.low_us / count for timing in timings]
    return [
        Record(layer, rows, side.name, round(t, 1), round(side.bytes / t / 1e3, 1), round(us[0] / t, 2))
        for side, t in zip(sides, us, strict=True)
    ]


def _ours(model: _Layers, inputs: Sequence[torch.Tensor]) -> list[_Side]:
    """This backend, as written and with its two precisions of weights."""
    n, k = model.layers[0].weight.shape  # type: ignore[misc]
    forms = {
        "as-written": ("float32", 4.0 * n * k),
        "int8-weights": ("int8", float(n * k + 4 * n)),
        "int4-weights": ("int4", n * k / 2 + 4 * n * k / GROUP),
    }
    sides = []
    for precision, (form, size) in forms.items():
        config = Config.from_env(os.environ).with_options({"placement": "estimate", "precision": precision}, None)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=functools.partial(compile_graph, config=config), dynamic=False)
        sides.append(_Side(f"hybrid {form}", functools.partial(compiled, *inputs), size, _TOLERANCES[form]))
        sides[-1].call()
    shared = copy.deepcopy(model)
    for layer in shared.layers:
        _share(layer)  # type: ignore[arg-type]
    torch._dynamo.reset()
    config = Config.from_env(os.environ).with_options({"placement": "estimate"}, None)
    compiled = torch.compile(shared, backend=functools.partial(compile_graph, config=config), dynamic=False)
    sides.append(_Side("hybrid clusters", functools.partial(compiled, *inputs), n * k / 2, _TOLERANCES["int4"]))
    sides[-1].call()
    return sides


def _share(layer: nn.Linear) -> None:
    """Gives a layer the nearest of 16 values, at even steps, in place of each weight: k-means would take minutes and find about the same."""
    w = layer.weight.detach()
    step = 2 * float(w.abs().max()) / FOUR_BIT_CLUSTERS
    places = (w / step + FOUR_BIT_CLUSTERS / 2).floor().clamp(0, FOUR_BIT_CLUSTERS - 1).to(torch.uint8)
    layer.weight = nn.Parameter((torch.arange(FOUR_BIT_CLUSTERS) - FOUR_BIT_CLUSTERS / 2 + 0.5) * step)
    indices = places[:, ::2] | places[:, 1::2] << 4
    parametrize.register_parametrization(
        layer, "weight", SharedWeight(indices, w.shape, FOUR_BIT_CLUSTERS), unsafe=True
    )


def _peers(model: _Layers, inputs: Sequence[torch.Tensor]) -> list[_Side]:
    """Eager float32, and PyTorch's operators on packed weights."""
    weights = [layer.weight.detach() for layer in model.layers]  # type: ignore[union-attr]
    n, k = weights[0].shape
    sides = [_Side("eager float32", lambda: model(*inputs), 4.0 * n * k, _TOLERANCES["float32"])]
    for dtype in (torch.bfloat16, torch.float32):
        name, extra = str(dtype).removeprefix("torch."), _TOLERANCES["bfloat16"]
        rows = [x.to(dtype) for x in inputs]
        bytes_ = [packed_int8(w, dtype) for w in weights]
        nibbles = [packed_int4(w, dtype) for w in weights]

        def int8(
            rows: Sequence[torch.Tensor] = rows, packed: Sequence[tuple[torch.Tensor, ...]] = bytes_
        ) -> list[torch.Tensor]:
            return [aten._weight_int8pack_mm(x, *w) for x, w in zip(rows, packed, strict=True)]

        def int4(
            rows: Sequence[torch.Tensor] = rows, packed: Sequence[tuple[torch.Tensor, ...]] = nibbles
        ) -> list[torch.Tensor]:
            return [aten._weight_int4pack_mm_for_cpu(x, q, GROUP, s) for x, (q, s) in zip(rows, packed, strict=True)]

        sides.append(_Side(f"aten int8 {name}", int8, n * k + dtype.itemsize * n, _TOLERANCES["int8"] + extra))
        size = n * k / 2 + 2 * dtype.itemsize * n * k / GROUP
        sides.append(_Side(f"aten int4 {name}", int4, size, _TOLERANCES["int4"] + extra))
    return sides


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized_weights", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), help="inputs x outputs, as 4096x11008")
    parser.add_argument("--rows", nargs="*", type=int, default=[1])
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds of timing per shape")
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    arguments = parser.parse_args(argv)
    records: list[Record] = []
    for layer in arguments.layers:
        for rows in arguments.rows:
            for record in compare(layer, rows, arguments.budget_s):
                records.append(record)
                sys.stdout.write(
                    f"{layer:>12} rows {rows:<4} {record.side:20} {record.us:>9} us {record.gbytes_per_s:>6} GB/s"
                    f" {record.gain:>6}x\n"
                )
            sys.stdout.flush()
    if arguments.out:
        machine.write_record(arguments.out, records=[asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
