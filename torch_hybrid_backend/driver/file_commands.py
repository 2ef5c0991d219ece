"""The subcommands of `hybrid` about `.hybrid` files: export, run, generate, inspect, sign. Part of the wiring."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from torch_hybrid_backend.artifact.manifest import Entry, Form, LiteralForm, Manifest, TensorForm
from torch_hybrid_backend.artifact.model import load
from torch_hybrid_backend.artifact.signing import sign as sign_file
from torch_hybrid_backend.artifact.tokenizer import open_tokenizer, token_texts
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.precision import PRECISIONS
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.errors import ArgumentError, failures
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.machine import check_threads
from torch_hybrid_backend.report.share import counted
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
    export.add_argument(
        "--target",
        dest="processors",
        action="append",
        metavar="NAME",
        help="the setting `target`: the processor that the file is for, such as x86-64-v3 or neoverse-n1 (docs/guides/arm.md); several are "
        "separated by commas, or the option is repeated",
    )
    export.add_argument(
        "--dynamic",
        action="append",
        default=[],
        metavar="INPUT:DIM[=MIN..MAX]",
        help="a dimension of an input, by the name of the argument, whose size may vary: input_ids:0 or input_ids:1=1..512; may be repeated",
    )
    export.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="export a decoder of transformers for `hybrid generate`, with a cache of N positions; the factory's arguments are not used",
    )
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
    generate = commands.add_parser(
        "generate",
        help="continue a text with a decoder from a file, and show how many tokens a second it reads and writes",
    )
    generate.add_argument("file", type=Path, help="a file that torch_hybrid_backend.export_generation wrote")
    generate.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the model's tokenizer.json; without it, --ids are continued, and ids are shown",
    )
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; needs --tokenizer")
    prompt.add_argument("--ids", metavar="IDS", help="the tokens to continue, such as 1,2,3")
    generate.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="the most new tokens; by default as many as the cache has room for",
    )
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0, the default, takes the likeliest token each time; above 0, tokens are drawn",
    )
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that together have the probability P"
    )
    generate.add_argument("--seed", type=int, metavar="N", help="draw the same tokens each time")
    generate.add_argument(
        "--stop",
        action="append",
        metavar="TOKEN",
        help="end behind this token: an id, or with --tokenizer a token's text such as '</s>'; by default the model's own",
    )
    generate.add_argument(
        "--threads", type=int, metavar="N", help="threads of the kernels; PyTorch's number by default"
    )
    generate.add_argument(
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
    # heavy, so not imported for --help
    from torch_hybrid_backend.driver.export import ENTRY, check_path, traced_program, write_programs
    from torch_hybrid_backend.driver.generation import export_generation

    path, factory = check_path(parsed.output), Factory(parsed.target)
    settings = {"precision": parsed.precision, "target": parsed.processors}
    options = {name: value for name, value in settings.items() if value is not None}
    with factory.importable():
        model, args, kwargs = factory.load()()
        if parsed.max_length is not None:
            report = export_generation(model, path, max_length=parsed.max_length, options=options)  # type: ignore[arg-type]
        else:
            config = Config.from_env(os.environ).with_options(options, None)
            asked = _asked_sizes(model, args, kwargs, parsed.dynamic)
            program = traced_program(model, tuple(args), kwargs, _dynamic_shapes(model, args, kwargs, asked))
            _begin_as_asked(program, asked)
            report = write_programs(model, {ENTRY: program}, {ENTRY: (args, kwargs)}, path, config)
            for warning in _narrowed(path, asked):
                sys.stderr.write(f"hybrid: {warning}\n")
    out.write(f"{report}\n")
    return 0


@dataclass(frozen=True, slots=True)
class _AskedSize:
    """A dimension of an input whose size may vary, in the range that was asked for, if one was."""

    name: str
    dim: int
    bounds: tuple[int, int] | None

    def __str__(self) -> str:
        return f"--dynamic {self.name}:{self.dim}" + ("" if self.bounds is None else "={}..{}".format(*self.bounds))


def _asked_sizes(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], texts: Sequence[str]
) -> Sequence[_AskedSize]:
    """The sizes that `--dynamic` asks for. Raises ArgumentError for what it cannot mean."""
    given = _arguments(model, args, kwargs)
    asked = []
    for text in texts:
        found = re.fullmatch(r"(\w+):(\d+)(?:=(\d+)\.\.(\d+))?", text)
        if found is None:
            raise ArgumentError(f"--dynamic {text} must be INPUT:DIM or INPUT:DIM=MIN..MAX, such as input_ids:1=1..512")
        name, dim, least, most = found.groups()
        if not isinstance(value := given.get(name), torch.Tensor) or int(dim) >= value.dim():
            known = [
                f"{each} ({held.dim()} dimensions)" for each, held in given.items() if isinstance(held, torch.Tensor)
            ]
            raise ArgumentError(
                f"--dynamic {text}: the call has no tensor {name} with a dimension {dim}; it has {', '.join(known)}"
            )
        if least is not None and int(least) > int(most):
            raise ArgumentError(f"--dynamic {text}: the least size is above the most")
        example = value.shape[int(dim)]
        if least is not None and not int(least) <= example <= int(most):
            raise ArgumentError(
                f"--dynamic {text}: the factory's example has the size {example} there, outside of the range: give an example inside, "
                "or widen the range"
            )
        if example < 2:
            raise ArgumentError(
                f"--dynamic {text}: the factory's example has the size {example} there, which torch.export takes for a constant: give an "
                "example of at least 2; the range may begin below"
            )
        asked.append(_AskedSize(name, int(dim), None if least is None else (int(least), int(most))))
    return asked


def _arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by name."""
    return signature(getattr(model, "forward", model)).bind(*args, **kwargs).arguments


def _dynamic_shapes(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], asked: Sequence[_AskedSize]
) -> dict[str, dict[int, Any]] | None:
    """The `dynamic_shapes` of `torch.export` for these sizes."""
    if not asked:
        return None
    dynamic: Any = torch.export.Dim.DYNAMIC
    shapes: dict[str, dict[int, Any]] = {name: {} for name in _arguments(model, args, kwargs)}
    for each in asked:
        bounds = each.bounds
        shapes[each.name][each.dim] = dynamic if bounds is None else dynamic(min=bounds[0], max=bounds[1])
    return shapes


def _begin_as_asked(program: torch.export.ExportedProgram, asked: Sequence[_AskedSize]) -> None:
    """Let ranges that were asked to begin below 2 do so.

    `Dim.DYNAMIC` begins at 2 whatever its `min`. A `Dim` would not, but needs to be told which sizes are equal, which `Dim.DYNAMIC` finds
    out.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    least: dict[Any, int] = {}
    for each in asked:
        size = values[each.name].shape[each.dim]
        if isinstance(size, torch.SymInt):
            begin = 2 if each.bounds is None else each.bounds[0]
            least[size.node.expr] = max(begin, least.get(size.node.expr, 0))
    for symbol, begin in least.items():
        found = program.range_constraints[symbol]
        if begin < 2 == found.lower:
            program.range_constraints[symbol] = type(found)(begin, found.upper)


def _narrowed(path: Path, asked: Sequence[_AskedSize]) -> list[str]:
    """Warnings about sizes that were asked for and that the file does not serve."""
    if not asked:
        return []
    variants = Manifest.all_from_json(Artifact(path, share=False, runs=False).manifest)
    warnings: dict[str, None] = {}
    for entry in (variant.entries[0] for variant in variants):
        names = [form.name for form in entry.inputs]
        ends = [entry, entry]
        if entry.symbols:
            ends = [entry.at([s.least for s in entry.symbols]), entry.at([s.most for s in entry.symbols])]
        for each in asked:
            forms = [end.inputs[names.index(each.name)] for end in ends]
            served = tuple(form.sizes[each.dim] for form in forms if isinstance(form, TensorForm))
            if each.bounds is not None and served != each.bounds:
                warning = f"{each} was asked for, and the file serves {served[0]}..{served[1]}"
                warnings[f"{warning}: the model, its other sizes or its kernels allow no more"] = None
    return list(warnings)


def run(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid run`."""
    _set_threads(parsed.threads)
    start = time.perf_counter()
    model = load(parsed.file, keys=parsed.key)
    opened_s = time.perf_counter() - start
    call = model.flat_entry(parsed.entry)
    inputs = _inputs(call.entry, call.sample_inputs, parsed.input)
    with torch.no_grad():
        results = call.run(inputs)
    for form, result in zip(call.entry.outputs, results, strict=True):
        out.write(f"{form.name}: {_told(result)}\n")
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


def generate(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid generate`."""
    _set_threads(parsed.threads)
    tokenizer = None if parsed.tokenizer is None else open_tokenizer(parsed.tokenizer)
    ids = _prompt_ids(parsed, tokenizer)
    stops = None if parsed.stop is None else [_stop_id(each, tokenizer) for each in parsed.stop]
    model = load(parsed.file, keys=parsed.key)
    tokens = model.generate(
        ids,
        parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        seed=parsed.seed,
        stop_tokens=stops,
    )
    text_of = token_texts(tokenizer)
    times = [time.perf_counter()]
    for token in tokens:
        times.append(time.perf_counter())
        out.write(text_of(token))
        out.flush()
    read_s, write_s = times[1] - times[0], times[-1] - times[1]
    told = f"\n{len(ids)} prompt tokens, {len(ids) / read_s:.1f} tokens/s; {len(times) - 1} new tokens"
    # The first new token comes out of the prompt.
    out.write(told + (f", {(len(times) - 2) / write_s:.1f} tokens/s\n" if len(times) > 2 else "\n"))
    return 0


def inspect(parsed: argparse.Namespace, out: TextIO) -> int:
    """Run `hybrid inspect`."""
    artifact = Artifact(parsed.file, share=False, runs=False)
    if parsed.json:
        out.write(json.dumps(json.loads(artifact.manifest), indent=2) + "\n")
        return 0
    variants = Manifest.all_from_json(artifact.manifest)
    manifest = variants[-1]
    lines = [f"{manifest.model}, written by torch_hybrid_backend {manifest.package} with torch {manifest.torch}"]
    segments = {segment.name: segment.size for segment in manifest.segments}
    for variant in variants:
        for target in variant.targets:
            lines.append(f"for {target.system} on {target.processor} with {', '.join(target.features)}")
            if len(variants) > 1:
                lines.append(
                    f"  {target.library}: {segments[target.library]:,} bytes, over {_weight_bytes(variant):,} of weights"
                )
    for entry in manifest.entries:
        lines.append(f"{entry.name}:")
        lines += [f"  takes {_described(form)}" for form in entry.inputs]
        lines += [f"  gives {_described(form)}" for form in entry.outputs]
        lines += [f"  serves {each}" for each in entry.served]
        lines += [f"  needs Python for {part}" for part in entry.python_parts]
        if entry.needs_torch:
            lines.append("  calls operators of PyTorch")
    lines += [f"state: {state.name}, {_bytes(manifest, state.constant)}" for state in manifest.states]
    if (text := manifest.generation) is not None:
        stops = f"stops behind {', '.join(map(str, text.stop_tokens))}" if text.stop_tokens else "has no stop tokens"
        lines.append(f"generates text of at most {text.max_length} tokens with the prompt; {stops}")
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


def _set_threads(count: int | None) -> None:
    if count is not None:
        check_threads(count, "--threads")
        torch.set_num_threads(count)


def _prompt_ids(parsed: argparse.Namespace, tokenizer: Any) -> list[int]:
    if parsed.prompt is not None:
        if tokenizer is None:
            raise ArgumentError("--prompt needs --tokenizer, the tokenizer.json of the model; or give --ids")
        ids: list[int] = tokenizer.encode(parsed.prompt).ids
        return ids
    try:
        return [int(each) for each in parsed.ids.split(",")]
    except ValueError as error:
        raise ArgumentError(
            f"--ids is {parsed.ids!r}; it must be whole numbers with commas between them, such as 1,2,3"
        ) from error


def _stop_id(given: str, tokenizer: Any) -> int:
    if given.isdecimal():
        return int(given)
    found: int | None = None if tokenizer is None else tokenizer.token_to_id(given)
    if found is None:
        known = "needs --tokenizer" if tokenizer is None else "is no token of the tokenizer"
        raise ArgumentError(
            f"--stop {given} {known}; give the id of a token, or the text of one token of the vocabulary"
        )
    return found


def _inputs(entry: Entry, sample: Sequence[Any], given: Sequence[str]) -> list[Any]:
    """The flat inputs of a call: those of the sample call, with arrays from files in their places."""
    names = [form.name for form in entry.inputs]
    inputs = dict(zip(names, sample, strict=True))
    tensors = [form.name for form in entry.inputs if not isinstance(form, LiteralForm)]
    positional = sum(not each.rpartition("=")[0] for each in given)
    if positional > len(tensors):
        raise ArgumentError(
            f"--input is given {counted(positional, 'time')} without a name, and {entry.name} takes "
            f"{counted(len(tensors), 'array')}: {', '.join(tensors) or 'none'}"
        )
    in_order = iter(tensors)
    for each in given:
        name, _, file = each.rpartition("=")
        name = name or next(in_order)
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


def _told(result: Any) -> str:
    """A result of a call: dtype, sizes and first values of a tensor."""
    if not isinstance(result, torch.Tensor):
        return repr(result)
    form = f"{str(result.dtype).removeprefix('torch.')} {tuple(result.shape)}"
    if not result.numel():
        return form
    shown = ", ".join(f"{value:.6g}" for value in result.detach().flatten()[:4].tolist())
    return f"{form} = {shown}{', ...' if result.numel() > 4 else ''}"


def _bytes(manifest: Manifest, number: int) -> str:
    constant = manifest.constants[number]
    return f"{constant.dtype} {constant.sizes}"


def _weight_bytes(manifest: Manifest) -> int:
    """Bytes of the tensors that kernels of a variant read of the file."""
    slots = {manifest.constants[slot] for entry in manifest.entries for slot in entry.slots}
    elements = {(each.segment, each.offset): (math.prod(each.sizes), each.dtype) for each in slots}
    return sum(count * getattr(torch, dtype).itemsize for count, dtype in elements.values())


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


RUN: Mapping[str, Any] = {"export": export, "run": run, "generate": generate, "inspect": inspect, "sign": sign}
