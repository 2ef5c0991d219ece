"""One model on one backend in a process of its own: compile, check, then time on demand.

A process per backend keeps caches, thread pools and allocators of one from helping or hurting another. The parent (`run`)
asks the processes in turn for one round each, so that a machine that slows down for a while slows all of them.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch._dynamo.utils import same

from benchmarks.models import ZOO, Size, tensors
from torch_hybrid_backend.measure import measure


@dataclass(frozen=True, slots=True)
class Task:
    """What one process runs."""

    model: str
    size: Size
    batch: int
    backend: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model is compiled and checked. `error` is empty where it may be timed, else why it may not.

    `compile_s`: seconds of the first two calls beyond two steady ones, caches empty. `max_error`: largest absolute
    difference from eager, over all outputs.
    """

    compile_s: float
    max_error: float
    error: str


def _inductor_freezing(model: nn.Module) -> Callable[..., object]:
    import torch._inductor.config as inductor

    inductor.freezing = True
    return torch.compile(model)


# The one list of backends. Adding a peer is adding a row (and its package to the "bench" extra).
BACKENDS: dict[str, Callable[[nn.Module], Callable[..., object]]] = {
    "eager": lambda model: model,
    "hybrid": lambda model: torch.compile(model, backend="hybrid"),
    "inductor": torch.compile,
    "inductor_freezing": _inductor_freezing,
}


def serve(connection: Connection, task: Task, budget_s: float) -> None:
    """Send one `Prepared`, then a median time in microseconds for each message received, until None is.

    `budget_s` is the time spent on one round.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as cache, torch.no_grad():
        os.environ["HYBRID_CACHE_DIR"] = os.path.join(cache, "hybrid")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
        prepared, call = _prepare(task)
        connection.send(prepared)
        while connection.recv() is not None:
            connection.send(measure([call], budget_s)[0].median_us)


def _prepare(task: Task) -> tuple[Prepared, Callable[[], object]]:
    entry = ZOO[task.model]
    model = entry.build(task.size)
    inputs = entry.inputs(task.size, task.batch)
    try:
        compiled = BACKENDS[task.backend](model)
        seconds = [_seconds(lambda: compiled(*inputs)) for _ in range(4)]
        result = tensors(compiled(*inputs))
    except Exception as error:  # a peer that cannot run a model is a result, not a failure of the benchmark
        return Prepared(0.0, float("nan"), f"{type(error).__name__}: {error}".splitlines()[0]), lambda: None
    expected = tensors(model(*inputs))
    exact = copy.deepcopy(model).double()
    reference = tensors(exact(*(value.double() if value.is_floating_point() else value for value in inputs)))
    correct = same(expected, result, reference)
    worst = max((a - b).abs().max().item() for a, b in zip(expected, result, strict=True))
    compile_s = max(0.0, seconds[0] + seconds[1] - seconds[2] - seconds[3])
    return Prepared(compile_s, worst, "" if correct else "results differ from eager's"), lambda: compiled(*inputs)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
