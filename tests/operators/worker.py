"""The process that runs samples for `run`. Tasks come as JSON lines:

    {"subject": ..., "kind": ..., "done": [numbers of samples not to run], "batch": samples whose kernels are compiled together}

Answers go out as JSON lines: {"at": number} before a sample runs, {"sample": number, mode: outcome, ...} after it,
{"error": why} where the samples could not be made, and {"done": number of samples in all} after each task.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch
from torch._decomp.decompositions_for_rng import PhiloxStateTracker

from tests.operators import moduleinfos, opinfos
from tests.operators.execution import Bench
from tests.operators.rows import outcome_to_wire
from tests.operators.tasks import Task, spread

# Samples of a task that run in every mode where the dtype is not float32; the others run in the first mode.
THOROUGH = 2


def main(modes: str, limit: str, cache_dir: str, threads: str, compilers: str) -> None:
    """Serve until the input ends."""
    # What libraries print must not get among the outcomes.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    _hasten()
    bench = Bench(Path(cache_dir), int(compilers), modes.split(","))
    for line in sys.stdin:
        _serve(bench, json.loads(line), int(limit) or None, out)


def _hasten() -> None:
    """Leave out what costs much in each capture and serves none here. A capture takes 60 ms with it, 25 ms without (2-core Zen 5)."""
    opinfos.table()
    moduleinfos.table()
    gc.collect()
    gc.freeze()  # the tables are a million objects, which every full collection would visit
    torch.fx.config.do_not_emit_stack_traces = True
    # A CUDA generator's state, which AOTAutograd keeps even where none is used; how long Dynamo's guards take.
    PhiloxStateTracker.reset = classmethod(lambda cls: None)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def _serve(bench: Bench, order: dict[str, Any], limit: int | None, out: TextIO) -> None:
    task = Task(order["subject"], order["kind"])
    try:
        samples = (moduleinfos if task.is_module else opinfos).samples(task)
    except Exception as error:  # whatever making samples raises: the task has none
        _say(out, {"error": f"no samples: {type(error).__name__}: {error}"[:300]})
        samples = []
    numbers = spread(len(samples), limit)
    if task.dtype != torch.float32:
        for number in numbers[THOROUGH:]:
            samples[number] = dataclasses.replace(samples[number], brief=True)
    left = [number for number in numbers if number not in set(order["done"])]
    for start in range(0, len(left), order["batch"]):
        batch = left[start : start + order["batch"]]
        _say(out, {"at": batch[0]})
        for number, outcomes in zip(batch, bench.run([samples[number] for number in batch]), strict=True):
            wire = {mode: outcome_to_wire(outcome) for mode, outcome in outcomes.items()}
            _say(out, {"sample": number, **wire})
    _say(out, {"done": len(samples)})


def _say(out: TextIO, message: dict[str, object]) -> None:
    out.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
