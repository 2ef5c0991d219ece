"""Compressed models: how small their files are, how fast they are read, and how far their outputs are off.

    python -m benchmarks.compression
    python -m benchmarks.compression --models minilm --out compression.json

For each model and setting of `torch_hybrid_backend.compress`: bytes of the file over those of the float32 state, bits per weight, seconds of
compressing, saving and loading, the megabytes of float32 weights that loading gives per second, and the relative root mean square
difference of the outputs. Models have the weights of the zoo: MiniLM its real ones, others random ones, whose outputs mean little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.models import ZOO, Model, Size, tensors
from benchmarks.table import RESULTS
from torch_hybrid_backend import compress, load_compressed, save_compressed

DEFAULT = ("resnet50", "minilm")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"clusters": 16},
    {"sparsity": 0.5, "clusters": 16},
    {"sparsity": 0.9, "clusters": 16},
    {"sparsity": 0.9},
)


def figures(model: Model, size: Size, setting: dict[str, Any]) -> dict[str, Any]:
    """A row of figures. The file is read back and compared with what was saved."""
    module, inputs = model.build(size), model.inputs(size, batch=2)
    before = sum(tensor.nbytes for tensor in module.state_dict().values())
    start = time.perf_counter()
    small = compress(module, **setting) if setting else module
    compressed = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        save_compressed(small, path)
        saved = time.perf_counter()
        found = load_compressed(path)
        loaded = time.perf_counter()
        size_bytes = path.stat().st_size
    for name, tensor in small.state_dict().items():
        if not torch.equal(found[name], tensor):
            raise RuntimeError(f"{name} was not read as it was saved")
    with torch.no_grad():
        wanted, got = tensors(module(*inputs))[0], tensors(small(*inputs))[0]
    return {
        "model": model.name,
        "setting": setting,
        "bytes": size_bytes,
        "share": round(size_bytes / before, 4),
        "bits_per_weight": round(size_bytes * 32 / before, 3),
        "compress_s": round(compressed - start, 2),
        "save_s": round(saved - compressed, 2),
        "load_s": round(loaded - saved, 3),
        "load_mb_per_s": round(before / 1e6 / (loaded - saved)),
        "output_difference": round(float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(DEFAULT))
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "compression.json", metavar="FILE")
    chosen = parser.parse_args(arguments)
    rows = []
    for name in chosen.models:
        for setting in SETTINGS:
            row = figures(ZOO[name], chosen.size, setting)
            rows.append(row)
            said = ", ".join(f"{key} {value}" for key, value in setting.items()) or "as it is"
            print(
                f"{name:10} {said:27} {row['bytes'] / 1e6:7.2f} MB, {row['share']:.3f} of float32, {row['bits_per_weight']:6.3f} bits a weight,"
                f" loads {row['load_mb_per_s']:6} MB/s, outputs off by {row['output_difference']:.3f}",
                flush=True,
            )
    machine.write_record(chosen.out, results=rows)


if __name__ == "__main__":
    main()
