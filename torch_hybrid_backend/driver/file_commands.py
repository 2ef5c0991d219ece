"""The subcommands of `hybrid` about `.hybrid` files: export, run, inspect, sign. Part of the wiring."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from torch_hybrid_backend.artifact.manifest import Entry, Form, LiteralForm, Manifest
from torch_hybrid_backend.artifact.model import load
from torch_hybrid_backend.artifact.signing import sign as sign_file
from torch_hybrid_backend.core.precision import PRECISIONS
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.errors import ArgumentError, failures
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.runtime.native.ops import Artifact

_BENCH_S = 2.0


def add_parsers(commands: Any) -> None:
    """Add the subcommands."""
    export = commands.add_parser("export", help="compile a model for inference and write it to one file")
    export.add_argument(
        "target", help="module:factory or script.py:factory; the factory returns (model, args[, kwargs])"
    )
    export.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file, such as model.hybrid"
    )
    export.add_argument("--precision", choices=PRECISIONS, help="the setting `precision` (docs/precision.md)")
    run = commands.add_parser("run", help="call a model from a file on inputs from files")
    run.add_argument("file", type=Path, help="a file that `hybrid export` wrote")
    run.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="an array (.npy) for an input, by name or in order; inputs without a file are those of the sample call",
    )
    run.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write the results into FOLDER, as .npy files by name"
    )
    run.add_argument("--entry", metavar="NAME", help="the function to call; the first one by default")
    run.add_argument("--threads", type=int, metavar="N", help="threads of the kernels; PyTorch's number by default")
    run.add_argument("--bench", action="store_true", help=f"call for {_BENCH_S:.0f} seconds and show the times")
    run.add_argument(
        "--key", type=Path, action="append", metavar="PEM", help="a public key, one of which must have signed the file"
    )
    inspect = commands.add_parser(
        "inspect", help="show what is in a file: entries, inputs, outputs, segments, signatures"
    )
    inspect.add_argument("file", type=Path, help="a file that `hybrid export` wrote")
    inspect.add_argument("--json", action="store_true", help="print the manifest as it stands in the file")
    sign = commands.add_parser("sign", help="add a signature to a file")
    sign.add_argument("file", type=Path, help="a file that `hybrid export` wrote")
    sign.add_argument(
        "--key",
        type=Path,
        required=True,
        metavar="PEM",
        help="a private key: openssl genpkey -algorithm ed25519 -out key.pem",
    )


def export(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid export`."""
    from torch_hybrid_backend.driver.export import export as export_model  # heavy, so not imported for --help

    factory = Factory(parsed.target)
    options = {} if parsed.precision is None else {"precision": parsed.precision}
    with factory.importable():
        model, args, kwargs = factory.load()()
        report = export_model(model, tuple(args), parsed.output, kwargs=kwargs, options=options)  # type: ignore[arg-type]
    out.write(f"{report}\n")
    return 0


def run(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid run`."""
    if parsed.threads is not None:
        if parsed.threads < 1:
            raise ArgumentError(f"--threads is {parsed.threads}; it must be a whole number, at least 1")
        torch.set_num_threads(parsed.threads)
    start = time.perf_counter()
    model = load(parsed.file, keys=parsed.key)
    opened_s = time.perf_counter() - start
    call = model.flat_entry(parsed.entry)
    inputs = _inputs(call.entry, call.sample_inputs, parsed.input)
    with torch.no_grad():
        results = call.run(inputs)
    for form, result in zip(call.entry.outputs, results, strict=True):
        out.write(f"{_described(form)}{_values(result)}\n")
        if parsed.output is not None and isinstance(result, torch.Tensor):
            _save(parsed.output, form.name, result)
    if parsed.bench:
        times = _times(lambda: call.run(inputs))
        low, median = min(times), statistics.median(times)
        out.write(
            f"opened in {time_in_words(opened_s * 1e6)}; {len(times)} calls with {torch.get_num_threads()} threads: median "
            f"{time_in_words(median * 1e6)}, fastest {time_in_words(low * 1e6)}\n"
        )
    return 0


def inspect(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid inspect`."""
    artifact = Artifact(parsed.file, share=False)
    if parsed.json:
        out.write(json.dumps(json.loads(artifact.manifest), indent=2) + "\n")
        return 0
    manifest = Manifest.from_json(artifact.manifest)
    lines = [f"{manifest.model}, written by torch_hybrid_backend {manifest.package} with torch {manifest.torch}"]
    for target in manifest.targets:
        lines.append(f"for {target.system} on {target.processor} with {', '.join(target.features)}")
    for entry in manifest.entries:
        lines.append(f"{entry.name}:")
        lines += [f"  takes {_described(form)}" for form in entry.inputs]
        lines += [f"  gives {_described(form)}" for form in entry.outputs]
        lines += [f"  serves {each}" for each in entry.served]
        lines += [f"  needs Python for {part}" for part in entry.python_parts]
        if entry.needs_torch:
            lines.append("  calls operators of PyTorch's")
    lines += [f"state: {state.name}, {_bytes(manifest, state.constant)}" for state in manifest.states]
    sizes: dict[str, int] = {}
    for segment in manifest.segments:
        sizes[segment.kind] = sizes.get(segment.kind, 0) + segment.size
    lines.append("bytes: " + ", ".join(f"{kind} {size:,}" for kind, size in sizes.items()))
    lines += [f"signed by {key.hex()} (not verified: `hybrid run --key` does)" for key, _ in artifact.signatures] or [
        "not signed"
    ]
    out.write("\n".join(lines) + "\n")
    return 0


def sign(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid sign`."""
    out.write(f"signed by {sign_file(parsed.file, parsed.key).hex()}\n")
    return 0


def _inputs(entry: Entry, sample: Sequence[Any], given: Sequence[str]) -> list[Any]:
    """The flat inputs of a call: those of the sample call, with arrays from files in their places."""
    names = [form.name for form in entry.inputs]
    inputs = dict(zip(names, sample, strict=True))
    unnamed = iter(form.name for form in entry.inputs if not isinstance(form, LiteralForm))
    for each in given:
        name, _, file = each.rpartition("=")
        if not name:
            name = next(unnamed, "")
        if name not in inputs:
            raise ArgumentError(
                f"--input {each}: {entry.name} has no such input; it takes {', '.join(names) or 'none'}"
            )
        try:
            inputs[name] = torch.from_numpy(np.load(file, allow_pickle=False))
        except failures(OSError, ValueError, TypeError) as error:
            raise ArgumentError(f"--input {each}: {file} is no array that can be read (.npy): {error}") from error
    return list(inputs.values())


def _described(form: Form) -> str:
    if isinstance(form, LiteralForm):
        return f"{form.name}: {form.value!r}"
    return f"{form.name}: {form.dtype} {form.sizes}"


def _values(result: Any) -> str:
    """The first values of a tensor."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return ""
    shown = ", ".join(
        f"{value:.6g}" for value in result.detach().flatten()[:4].tolist() if not isinstance(value, complex)
    )
    return f" = {shown}{', ...' if result.numel() > 4 else ''}"


def _bytes(manifest: Manifest, number: int) -> str:
    constant = manifest.constants[number]
    return f"{constant.dtype} {constant.sizes}"


def _save(folder: Path, name: str, result: torch.Tensor) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        wide = result.float() if result.dtype == torch.bfloat16 else result  # numpy has no such type
        np.save(folder / f"{name}.npy", wide.detach().contiguous().numpy())
    except failures(OSError, TypeError) as error:
        raise ArgumentError(f"{name} cannot be written into {folder}: {error}") from error


def _times(call: Any) -> list[float]:
    times: list[float] = []
    with torch.no_grad():
        end = time.perf_counter() + _BENCH_S
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return times


RUN: Mapping[str, Any] = {"export": export, "run": run, "inspect": inspect, "sign": sign}
