"""PyTorch's table of operators (`op_db`) beside the TensorRT engine: what it takes, what it refuses and why, and what its builder makes of it.

    python -m tests.engines.tensorrt.operators docs/tensorrt_operators.md
    python -m tests.engines.tensorrt.operators PAGE --ops 'add|mul' --kinds float32

Two samples of each operator and dtype are captured as the backend captures them. What the engine takes in float32 is built, an engine for
each region. Nothing is run. Samples are tried in worker processes: one that kills its own counts as crashed.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.engines.tensorrt import no_gpu  # noqa: F401  before anything imports torch_tensorrt

ROOT = Path(__file__).parents[3]
KINDS = ("float32", "float16", "bfloat16", "int64", "bool")
BUILT = "float32"
SAMPLES = 2
_CHUNK = 40  # operators of a worker: kernels of TensorRT's builder stay loaded
_SILENCE_S = 300

# What became of a sample, the worst last.
NOTHING, TAKEN, PART, REFUSED, FAILED, CRASHED = "nothing", "taken", "part", "refused", "not built", "crashed"

PAGE = """\
# What the TensorRT engine takes: operators

Generated; do not edit. `make tensorrt-operators` renews it{how}.

PyTorch's own table of operators (`op_db`), captured as the backend captures it and judged as the engine judges it: by what torch_tensorrt's
lowering makes of each ATen operator. Two samples of each operator and dtype. What is taken in float32 is also **built**: an engine of each
region, by TensorRT's own builder. **No GPU ran any of it**, so nothing here says that results are right: the accuracy check of a first call
does. What is refused, other engines and PyTorch's own operators run.

Versions: {versions}.

| column | meaning |
| --- | --- |
| samples | how many were captured; the others are no traceable function of tensors, or need a device |
| taken, part | samples of which every operator is taken, or some |
| refused | samples of which none is |
| nothing | samples with nothing to compute: views, or tensors without elements |
| not built | samples that are taken, and that a converter or TensorRT's builder fails for: the region falls back, with a warning |
| crashed | samples that killed their process; a build has one of its own |

| dtype | operators | samples | taken | part | refused | nothing | not built | crashed |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{summary}

## Why operators are refused

How many operators of the table have a sample in which the ATen operator is refused with the code.

| ATen operator | code | operators | why |
| --- | --- | ---: | --- |
{refusals}

## Not built

| operator | why |
| --- | --- |
{failures}

## By operator

The worst of an operator's samples, by dtype.

| operator | {kinds} |
| --- | {rule} |
{operators}
"""


def judged(subject: str, kind: str) -> Iterator[dict[str, Any]]:
    """A record for each sample of an operator, with what became of it and the refusals: (operator, code, sentence)."""
    from tests.operators import opinfos
    from tests.operators.tasks import Task, spread

    task = Task(subject, kind)
    if not opinfos.supported(task):
        return
    samples = opinfos.samples(task)
    for number in spread(len(samples), SAMPLES):
        sample = samples[number]
        call = _call_on_tensors(sample.subject.call, sample.arguments)
        try:
            with torch.no_grad():
                graphs = _captured(*call)
        except Exception:  # no function of tensors, as for other engines: tests.operators counts those
            continue
        yield _outcome(graphs, build=kind == BUILT)


def _call_on_tensors(call: Callable[..., Any], arguments: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    leaves, spec = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def on_tensors(*given: torch.Tensor) -> list[torch.Tensor]:
        left = iter(given)
        results = call(
            *tree_unflatten([next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        )
        return [result for result in tree_flatten(results)[0] if isinstance(result, torch.Tensor)]

    return on_tensors, tensors


def _captured(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.fx.GraphModule]:
    from torch_hybrid_backend.capture.aot import capture

    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(captured: Any) -> Callable[[list[Any]], Any]:
        graphs.append(captured.graph_module)
        return captured.graph_module.forward  # type: ignore[no-any-return]

    capture(make_fx(function)(*tensors), list(tensors), compile_graph, ())
    return graphs


def _outcome(graphs: Iterable[torch.fx.GraphModule], *, build: bool) -> dict[str, Any]:
    from tests.engines.tensorrt.regions_for_tests import built, engine
    from torch_hybrid_backend.config import Config
    from torch_hybrid_backend.errors import CompileError
    from torch_hybrid_backend.graph.schema import is_view
    from torch_hybrid_backend.partition.regions import partition_graph

    statuses, refusals, failure = {NOTHING}, [], ""
    for graph in graphs:
        cut = partition_graph(graph, [engine()], Config(min_region_nodes=1))
        computing = {n.name for n in graph.graph.nodes if n.op == "call_function" and not is_view(n)}
        for node in cut.nodes:
            if node.name in computing and any(refusal.code != "empty" for refusal in node.refusals):
                statuses.add(REFUSED)
                refusals += [(node.operator, refusal.code, refusal.why) for refusal in node.refusals]
            elif node.name in computing and not node.refusals:
                statuses.add(TAKEN)
        for segment in cut.graph.segments if build else ():
            if segment.engine_hint == "tensorrt":
                try:
                    built(segment.region)
                except CompileError as error:
                    failure = str(error).partition("\n")[0]
    if failure:
        return {"status": FAILED, "refusals": refusals, "why": failure}
    status = PART if {TAKEN, REFUSED} <= statuses else next(s for s in (TAKEN, REFUSED, NOTHING) if s in statuses)
    return {"status": status, "refusals": refusals}


# --- processes --------------------------------------------------------------------------------------------------------------------------


def _work(names: Sequence[str], kind: str) -> None:
    """What a worker does: a line before each operator, and one with its records behind it."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        print(json.dumps({"ends": name, "records": list(judged(name, kind))}), flush=True)


def records(names: Sequence[str], kind: str) -> dict[str, list[dict[str, Any]]]:
    """The records of each operator, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    left = list(names)
    while left:
        chunk, last = left[:_CHUNK], ""
        command = [sys.executable, "-m", "tests.engines.tensorrt.operators", "-", "--worker", kind, *chunk]
        try:
            output = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=_SILENCE_S * 2, check=False
            ).stdout
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        for line in output.splitlines():
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            if "begins" in answer:
                last = answer["begins"]
            else:
                found[answer["ends"]] = answer["records"]
        if last and last not in found:
            found[last] = [{"status": CRASHED, "refusals": []}]
        if not any(name in found for name in chunk):
            raise RuntimeError(f"a worker did nothing: {command}")
        left = [name for name in left if name not in found]
        sys.stderr.write(f"{kind}: {len(left)} operators left\n")
    return found


# --- page -------------------------------------------------------------------------------------------------------------------------------


def page(by_kind: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]], versions: str, how: str) -> str:
    """The page for the records of each operator, by dtype. `how`: with which arguments it was made."""
    summary, failures = [], []
    refusals: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    whys: dict[tuple[str, str], str] = {}
    names: dict[str, dict[str, str]] = collections.defaultdict(dict)
    order = [NOTHING, TAKEN, PART, REFUSED, FAILED, CRASHED]
    for kind, operators in by_kind.items():
        counts = collections.Counter(record["status"] for found in operators.values() for record in found)
        columns = [counts[status] for status in (TAKEN, PART, REFUSED, NOTHING, FAILED, CRASHED)]
        summary.append(
            f"| {kind} | {sum(bool(found) for found in operators.values())} | {sum(counts.values())} | "
            + " | ".join(map(str, columns))
            + " |"
        )
        for name, found in sorted(operators.items()):
            if found:
                names[name][kind] = max((record["status"] for record in found), key=order.index)
            for record in found:
                for operator, code, why in record["refusals"]:
                    refusals[operator, code].add(name)
                    whys.setdefault((operator, code), why)
                if record["status"] in (FAILED, CRASHED):
                    failures.append(f"| {name} | {_cell(record.get('why', record['status']))} |")
    rows = sorted(refusals.items(), key=lambda item: (-len(item[1]), item[0]))
    return PAGE.format(
        versions=versions,
        how=how,
        summary="\n".join(summary),
        refusals="\n".join(f"| {o} | {c} | {len(n)} | {_cell(whys[o, c])} |" for (o, c), n in rows),
        failures="\n".join(dict.fromkeys(failures)) or "| none | |",
        kinds=" | ".join(by_kind),
        rule=" | ".join("---" for _ in by_kind),
        operators="\n".join(
            f"| {name} | {' | '.join(names[name].get(kind, '') for kind in by_kind)} |" for name in sorted(names)
        ),
    )


def _cell(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text.replace("|", "\\|"))[:200]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--ops", default=".*", help="operators whose names match this entirely")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _work(options.worker[1:], options.worker[0])
        return
    from tests.operators import opinfos
    from torch_hybrid_backend.engines.tensorrt.installed import installation

    names = [name for name in opinfos.table() if re.fullmatch(options.ops, name)]
    by_kind = {kind: records(names, kind) for kind in options.kinds.split(",")}
    given = [f"--ops '{options.ops}'"] * (options.ops != ".*") + [f"--kinds {options.kinds}"] * (
        options.kinds != ",".join(KINDS)
    )
    how = f"; this one is of a part of the table: `{' '.join(given)}`" if given else ""
    options.page.write_text(page(by_kind, f"torch {torch.__version__}, {installation()}", how))


if __name__ == "__main__":
    main()
