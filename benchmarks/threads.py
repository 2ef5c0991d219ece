"""Threads: what a second core gains one call, and what two models cost each other when two Python threads call them at once.

    python -m benchmarks.threads
    python -m benchmarks.threads --models resnet50,bert_base --seconds 2 --out threads.json

For each model, in eager and through the backend, compiled anew under each number of threads (`torch.set_num_threads`):

scaling   milliseconds of a call on one thread, on two, ... on all; `speedup` is the first over this one.
together  two instances of the model, called by one Python thread each, on 1 thread each and on all threads each, against one of them
          alone under the same setting. `kept` is the work done together over what the cores allow: the rate of both, over the rate of one
          alone times the number of them that fit on the cores. 1 means that they do not slow each other beyond the cores.

Alone and together take turns, in rounds; figures are medians of the rounds. Answers are compared with eager's before and after. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from benchmarks import machine
from benchmarks.catalogue import MODELS
from benchmarks.models import Model, Size, tensors
from torch_hybrid_backend.measuring.measure import measure

DEFAULT = ("resnet50", "mobilenet_v2", "bert_base")
BACKENDS = ("eager", "hybrid")
_ROUNDS = 5
_INSTANCES = 2

Call = Callable[[], Any]


def _call(model: Model, size: Size, backend: str, threads: int) -> Call:
    """An instance of the model, called without gradients on inputs of its own, its answer compared with eager's."""
    torch.set_num_threads(threads)
    module, inputs = model.build(size), model.inputs(size, 1)
    run = module if backend == "eager" else torch.compile(module, backend=backend, dynamic=False)

    def call() -> Any:
        with torch.no_grad():
            return run(*inputs)

    call()
    with torch.no_grad():
        _check(call(), module(*inputs))
    return call


def _check(found: Any, expected: Any) -> None:
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def scaling(model: Model, size: Size, backend: str, threads: Sequence[int], budget_s: float) -> list[dict[str, Any]]:
    """A record for each number of threads, in rising order; `speedup` is over the first."""
    records: list[dict[str, Any]] = []
    for count in threads:
        torch._dynamo.reset()
        (timing,) = measure([_call(model, size, backend, count)], budget_s)
        ms = round(timing.median_us / 1e3, 4)
        speedup = round((records[0]["ms"] if records else ms) / ms, 3)
        records.append({"kind": "scaling", "model": model.name, "backend": backend, "threads": count})
        records[-1] |= {"ms": ms, "speedup": speedup}
    return records


def _rates(calls: Sequence[Call], seconds: float) -> list[float]:
    """Calls a second of each, all of them called at once, each by a thread of its own, for so long."""
    rates = [0.0] * len(calls)
    raised: list[BaseException] = []
    together = threading.Barrier(len(calls))

    def work(index: int) -> None:
        try:
            together.wait()
            start, done = time.perf_counter(), 0
            while (spent := time.perf_counter() - start) < seconds or not done:
                calls[index]()
                done += 1
            rates[index] = done / spent
        except BaseException as error:  # whatever it is, the caller's thread raises it
            raised.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if raised:
        raise raised[0]
    return rates


def together(model: Model, size: Size, backend: str, threads: int, cores: int, budget_s: float) -> dict[str, Any]:
    """Two instances of the model at once, `threads` threads each, against one of them; see the module's text for `kept`."""
    torch._dynamo.reset()
    calls = [_call(model, size, backend, threads) for _ in range(_INSTANCES)]
    expected = [call() for call in calls]
    alone: list[float] = []
    both: list[float] = []
    for _ in range(_ROUNDS):
        alone += _rates(calls[:1], budget_s / _ROUNDS / 2)
        both.append(sum(_rates(calls, budget_s / _ROUNDS / 2)))
    for call, answer in zip(calls, expected, strict=True):
        _check(call(), answer)
    rate_alone, rate_both = statistics.median(alone), statistics.median(both)
    return {
        "kind": "together",
        "model": model.name,
        "backend": backend,
        "threads": threads,
        "alone_per_s": round(rate_alone, 2),
        "together_per_s": round(rate_both, 2),
        "kept": round(rate_both / (rate_alone * max(1.0, min(_INSTANCES, cores / threads))), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(DEFAULT), help="of the catalogue, comma separated")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing for each record")
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    arguments = parser.parse_args(argv)
    names = arguments.models.split(",")
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = sorted({1, 2, cores} & set(range(1, cores + 1)))
    torch._dynamo.config.recompile_limit = 64  # instances of a model share its code
    records: list[dict[str, Any]] = []

    def tell(record: dict[str, Any]) -> None:
        records.append(record)
        sys.stdout.write("  ".join(f"{key} {value}" for key, value in record.items()) + "\n")
        sys.stdout.flush()

    for name in names:
        for backend in BACKENDS:
            for record in scaling(MODELS[name], arguments.size, backend, counts, arguments.seconds):
                tell(record)
            for count in sorted({1, cores}):
                tell(together(MODELS[name], arguments.size, backend, count, cores, arguments.seconds))
    if arguments.out:
        machine.write_record(arguments.out, records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
