"""PyTorch's table of operators (`op_db`) on the TensorRT engine: what the engine takes, what it refuses and why, and what its builder makes.

    python -m tests.engines.tensorrt.operators docs/tensorrt_operators.md --out DIR
    python -m tests.engines.tensorrt.operators PAGE --out DIR --ops 'add|mul' --kinds float32

Samples are captured as the backend captures them for a GPU; no GPU is needed. For one of the samples that the engine takes, an engine is built
for each region. Nothing is run. Samples are tried in worker processes; a sample whose worker dies or hangs counts as crashed. An interrupted
run continues from the journal in DIR.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.engines.tensorrt import no_gpu  # noqa: F401  before anything imports torch_tensorrt
from tests.operators.tasks import Task, spread

ROOT = Path(__file__).parents[3]
# "dynamic": the first dimension of the first tensor, and those equal to it, are known only at run time.
KINDS = ("float32", "float32 dynamic", "float16", "bfloat16", "int64", "int64 dynamic")
BUILT = ("float32", "float32 dynamic")
SAMPLES = 2
_CHUNK = 250  # tasks of a worker: kernels of TensorRT's builder stay loaded
_SILENCE_S = 240.0

# What became of a sample, the worst last.
NOTHING, TAKEN, PART, REFUSED, FAILED, CRASHED = "nothing", "taken", "part", "refused", "not built", "crashed"
STATUSES = (NOTHING, TAKEN, PART, REFUSED, FAILED, CRASHED)
Record = dict[str, Any]

PAGE = """\
# What the TensorRT engine takes: operators

Generated; do not edit. `make tensorrt-operators` renews it{how}.

PyTorch's own table of operators (`op_db`), captured for inference on a GPU as the backend captures it, and judged as the engine judges it: by
what torch_tensorrt's lowering makes of each ATen operator. Two samples of each operator and dtype; "dynamic": the first dimension is known only
at run time, the first tensor's and those equal to it. Of {built} the smallest sample that is taken
is also **built**: an engine of each region, by TensorRT's own builder. **No GPU ran any of it**, so nothing here says that results are right:
the accuracy check of a first call does. What is refused, other engines and PyTorch's own operators run.

Versions: {versions}. Date: {day}.

| column | meaning |
| --- | --- |
| operators | how many have a sample that can be captured: as one traceable function of tensors |
| taken, part | samples of which every ATen operator is taken, or some |
| refused | samples of which none is |
| nothing | samples with nothing to compute: views, or tensors without elements |
| not built | samples that are taken, and that a converter or TensorRT's builder fails for: the region falls back, with a warning |
| crashed | samples that killed their process; a build has one of its own |

| dtype | operators | samples | taken | part | refused | nothing | not built | crashed | built |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{summary}

## ATen operators that are refused

In some sample at least; *operators*: how many of the table have one; *taken too*: whether other samples with it are taken.

| ATen operator | code | dtypes | operators | taken too | why (of the first one) |
| --- | --- | --- | ---: | --- | --- |
{refusals}

## ATen operators that are taken wherever they are met

{taken}

## Not built

| operator | dtype | why |
| --- | --- | --- |
{failures}

## By operator of the table

The worst that becomes of an operator's samples, by dtype; operators to which the same happens share a row.

| {kinds} | operators |
| {rule} | --- |
{operators}
"""


def judged(task: Task) -> Iterator[Record]:
    """Records of a task, one for each sample: the outcome, and ATen operator -> "" or the refusal, (code, sentence). For kinds that are built,
    the smallest sample that is taken is built as well."""
    from tests.operators import opinfos

    samples = opinfos.samples(task)
    found: list[tuple[int, Any, Record]] = []
    for number in spread(len(samples), SAMPLES):
        try:
            graphs = captured(samples[number], is_dynamic=task.variant == "dynamic")
        except Exception:  # no function of tensors, as for other engines: tests.operators counts those
            continue
        cuts, record = _outcome(graphs)
        found.append((_elements(samples[number]), cuts, record))
    able = [each for each in found if each[2]["status"] in (TAKEN, PART)]
    if able and task.kind in BUILT:
        _, cuts, record = min(able, key=lambda each: each[0])
        failure = _failure(cuts)
        record |= {"status": FAILED, "why": failure} if failure else {"built": True}
    for _, _, record in found:
        yield record


def captured(sample: Any, *, is_dynamic: bool) -> list[torch.fx.GraphModule]:
    """The graphs of a sample on a GPU. If a torch without CUDA cannot trace an operator there, the sample is captured for the CPU."""
    try:
        return _captured(sample, "cuda", is_dynamic)
    except Exception:
        return _captured(sample, "cpu", is_dynamic)


def _captured(sample: Any, device: str, is_dynamic: bool) -> list[torch.fx.GraphModule]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from tests.operators.execution import Flat
    from tests.operators.values import tensors_of
    from torch_hybrid_backend.capture.aot import capture

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    given = tensors_of(sample.arguments)
    batch = next((t.shape[0] for t in given if t.dim()), 1) if is_dynamic else 1
    tensors = [_faked(tensor, number, mode, device, batch) for number, tensor in enumerate(given)]
    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(graph: Any) -> Callable[[list[Any]], Any]:
        graphs.append(graph.graph_module)
        return graph.graph_module.forward  # type: ignore[no-any-return]

    with torch.no_grad():
        capture(Flat(sample.subject.call, sample.arguments), tensors, compile_graph, ())
    return graphs


def _faked(tensor: torch.Tensor, number: int, mode: Any, device: str, batch: int) -> torch.Tensor:
    """A tensor without data. Its first dimension is symbolic if that is `batch` and not 1."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [
        DimDynamic.DUCK if d == 0 and size == batch > 1 else DimDynamic.STATIC for d, size in enumerate(tensor.shape)
    ]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[var-annotated]
    known = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"tensor{number}"))
    with mode:
        return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=device)


def _outcome(graphs: Sequence[torch.fx.GraphModule]) -> tuple[list[Any], Record]:
    from tests.engines.tensorrt.regions_for_tests import engine
    from torch_hybrid_backend.config import Config
    from torch_hybrid_backend.partition.regions import partition_graph

    offered = engine()
    offered.devices = frozenset({"cpu", "cuda"})
    statuses, operators, cuts = {NOTHING}, {}, []
    for graph in graphs:
        cut = partition_graph(graph, [offered], Config(min_region_nodes=1))
        cuts.append(cut.graph)
        computing = {node.name for node in graph.graph.nodes if _computes(node)}
        lost = {
            name: refused
            for segment in cut.graph.segments
            if segment.engine_hint == "tensorrt" and not (refused := offered.accepts(segment.region))
            for name in segment.region.node_names
        }
        for node in cut.nodes:
            # That a region is too small is no refusal of the operator, but of this place for it.
            refusal = next((each for each in node.refusals if each.code != "too_small"), None) or lost.get(node.name)
            if node.name in computing and (refusal is None or refusal.code != "empty"):
                statuses.add(TAKEN if refusal is None else REFUSED)
                operators.setdefault(node.operator, "" if refusal is None else [str(refusal.code), refusal.why])
    status = PART if {TAKEN, REFUSED} <= statuses else next(s for s in (TAKEN, REFUSED, NOTHING) if s in statuses)
    return cuts, {"status": status, "operators": operators}


def _computes(node: torch.fx.Node) -> bool:
    """True if an operator yields tensors, and is no view, item or size."""
    from torch_hybrid_backend.graph.schema import is_item, is_view

    results = tree_leaves(node.meta.get("val"))
    yields = any(isinstance(result, torch.Tensor) for result in results)
    return node.op == "call_function" and yields and not is_view(node) and not is_item(node)


def _elements(sample: Any) -> int:
    from tests.operators.values import tensors_of

    return sum(tensor.numel() for tensor in tensors_of(sample.arguments))


def _failure(cuts: Sequence[Any]) -> str:
    """The reason why an engine of these graphs cannot be built; "" if all can."""
    from tests.engines.tensorrt.regions_for_tests import built, engine
    from torch_hybrid_backend.errors import CompileError

    for cut in cuts:
        for segment in cut.segments:
            if segment.engine_hint == "tensorrt" and engine().accepts(segment.region):
                try:
                    built(segment.region)
                except CompileError as error:
                    return str(error).partition("\n")[0]
    return ""


# --- processes --------------------------------------------------------------------------------------------------------------------------


def _work() -> None:
    """Run a worker: read a task from each line, and write its records as one line."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps({"records": list(judged(Task(*json.loads(line))))}), flush=True)


class Journal:
    """The records of tasks in a file, one line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.records: dict[Task, list[Record]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                subject, kind, records = json.loads(line)
                self.records[Task(subject, kind)] = records

    def add(self, task: Task, records: list[Record]) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps([task.subject, task.kind, records]) + "\n")
            self.records[task] = records


def run(tasks: Sequence[Task], journal: Journal, workers: int) -> None:
    """Try the tasks that the journal lacks."""
    left = [task for task in tasks if task not in journal.records]
    chunks = [left[start : start + _CHUNK] for start in range(0, len(left), _CHUNK)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for number, _ in enumerate(pool.map(lambda chunk: _run_chunk(chunk, journal), chunks), 1):
            sys.stderr.write(f"{number} of {len(chunks)} parts\n")


def _run_chunk(tasks: Sequence[Task], journal: Journal) -> None:
    left = list(tasks)
    while left:
        command = [sys.executable, "-m", "tests.engines.tensorrt.operators", "--worker"]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                for task in list(left):
                    process.stdin.write(json.dumps([task.subject, task.kind]) + "\n")
                    process.stdin.flush()
                    records = _answer(process)
                    if records is None:
                        break
                    journal.add(left.pop(0), records)
        if left:  # it died or was late at this one
            journal.add(left.pop(0), [{"status": CRASHED, "operators": {}}])


def _answer(process: subprocess.Popen[str]) -> list[Record] | None:
    """A worker's answer to a task; None if the worker died, or was silent and was killed."""
    assert process.stdout is not None
    late = threading.Timer(_SILENCE_S, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if line.startswith('{"records"'):
                return json.loads(line)["records"]  # type: ignore[no-any-return]
        return None
    finally:
        late.cancel()


# --- page -------------------------------------------------------------------------------------------------------------------------------


def page(journal: Mapping[Task, Sequence[Record]], versions: str, how: str = "") -> str:
    """The page for the records of tasks. `how`: the arguments with which the page was made."""
    kinds = [kind for kind in KINDS if any(task.kind == kind for task in journal)]
    found = {task: records for task, records in journal.items() if records}
    refusals, taken = _aten(found)
    failures = {
        f"| {task.subject} | {task.kind} | {_cell(record.get('why', record['status']))} |"
        for task, records in found.items()
        for record in records
        if record["status"] in (FAILED, CRASHED)
    }
    return PAGE.format(
        versions=versions,
        day=time.strftime("%Y-%m-%d"),
        how=how,
        built=", ".join(kind for kind in kinds if kind in BUILT),
        summary="\n".join(_summary(kind, found) for kind in kinds),
        refusals="\n".join(refusals),
        taken=" ".join(f"`{name}`" for name in taken),
        failures="\n".join(sorted(failures)) or "| none | | |",
        kinds=" | ".join(kinds),
        rule=" | ".join("---" for _ in kinds),
        operators="\n".join(_by_outcome(found, kinds)),
    )


def _summary(kind: str, found: Mapping[Task, Sequence[Record]]) -> str:
    own = [records for task, records in found.items() if task.kind == kind]
    counts = collections.Counter(record["status"] for records in own for record in records)
    columns = [counts[status] for status in (TAKEN, PART, REFUSED, NOTHING, FAILED, CRASHED)]
    built = sum(record.get("built", False) for records in own for record in records)
    return f"| {kind} | {len(own)} | {sum(counts.values())} | {' | '.join(map(str, columns))} | {built or '-'} |"


def _aten(found: Mapping[Task, Sequence[Record]]) -> tuple[list[str], list[str]]:
    """Rows of ATen operators that are refused, most frequent first, and of those that are always taken."""
    subjects: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    kinds: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    whys: dict[tuple[str, str], str] = {}
    taken: set[str] = set()
    for task, records in found.items():
        for record in records:
            for operator, refusal in record["operators"].items():
                if not refusal:
                    taken.add(operator)
                    continue
                code, why = refusal
                subjects[operator, code].add(task.subject)
                kinds[operator, code].add(task.kind)
                whys.setdefault((operator, code), why)
    rows = [
        f"| {operator} | {code} | {', '.join(k for k in KINDS if k in kinds[operator, code])} | {len(names)} | "
        f"{'yes' if operator in taken else ''} | {_cell(whys[operator, code])} |"
        for (operator, code), names in sorted(subjects.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return rows, sorted(taken - {operator for operator, _ in subjects})


def _by_outcome(found: Mapping[Task, Sequence[Record]], kinds: Sequence[str]) -> list[str]:
    """Rows of operators by kind and by the worst outcome of their samples."""
    worst: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for task, records in found.items():
        worst[task.subject][task.kind] = max((record["status"] for record in records), key=STATUSES.index)
    groups: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for subject, own in sorted(worst.items()):
        groups[tuple(own.get(kind, "") for kind in kinds)].append(subject)
    return [
        f"| {' | '.join(outcomes)} | {', '.join(names)} |"
        for outcomes, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _cell(text: str) -> str:
    text = re.sub(r" \(<class 'torch.SymInt'>, \d+\)|( for)? <torch\.\S+ object at 0x[0-9a-f]+>", " ", text)
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    return textwrap.shorten(text.replace("|", "\\|"), 160, placeholder=" ...")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="folder of the journal")
    parser.add_argument("--ops", default=".*", help="operators whose names match this entirely")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _work()
        return
    if options.page is None or options.out is None:
        parser.error("PAGE and --out are needed")
    from tests.operators.tasks import tasks
    from torch_hybrid_backend.engines.tensorrt.installed import installation

    wanted = tasks(options.ops, options.kinds.split(","))
    options.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.out / "journal.jsonl")
    run(wanted, journal, options.workers)
    given = [f"--ops '{options.ops}'"] * (options.ops != ".*") + [f"--kinds '{options.kinds}'"] * (
        options.kinds != ",".join(KINDS)
    )
    how = f"; this one is of a part of the table: `{' '.join(given)}`" if given else ""
    versions = f"torch {torch.__version__}, {installation()}"
    options.page.write_text(page({task: journal.records[task] for task in wanted}, versions, how))


if __name__ == "__main__":
    main()
