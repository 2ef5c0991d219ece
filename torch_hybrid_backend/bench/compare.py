"""Comparison of peers on one model at one batch size: prepare them one after the other, then time them in interleaved rounds."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_hybrid_backend.bench.machine import today
from torch_hybrid_backend.bench.peers import FLOAT32, OURS, Peer, by_name
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess, wait_until_quiet
from torch_hybrid_backend.bench.worker import Account, Facts, Prepare, Ready, Reference, Round, Work, environment

_OURS_MODULE = by_name()[OURS].module
_FILLED = "filled"  # an empty file that marks a complete cache


@dataclass(frozen=True, slots=True)
class Effort:
    """Effort of a measurement. `seconds`: time for one model, all peers together. `timeout_s`: the longest wait for an answer of a peer.

    `warm`: names of peers whose warm compile time is measured, by a second process that starts with the caches of the first.
    `caches`: the folder where caches outlive the run, except hybrid's. A peer that finds a complete cache there has a warm compile time instead
    of a cold one. None: every run starts with empty caches.
    """

    seconds: float = 20.0
    rounds: int = 5
    timeout_s: float = 300.0
    warm: frozenset[str] = frozenset()
    caches: Path | None = None

    def cache(self, work: Work, peer: Peer) -> Path:
        """The folder of the peer's cache for this work: either complete (`_is_filled`) or empty."""
        if self.caches is None or peer.module == _OURS_MODULE or not peer.keeps_cache:
            return work.folder / peer.name
        precision = peer.precision or work.precision
        name = peer.name if precision == FLOAT32 else f"{peer.name}-{precision}"
        cache = self.caches / f"{work.key}-{name}"
        # With the partial cache of an interrupted run, the compile time would be neither cold nor warm.
        if not _is_filled(cache):
            shutil.rmtree(cache, ignore_errors=True)
        return cache


@dataclass(slots=True)
class _Runner:
    """A peer's worker. `gap`: the reason why the peer is not timed any more; empty if it is."""

    peer: Peer
    worker: WorkerProcess
    cache: Path
    was_filled: bool
    gap: str = ""
    ready: Ready | None = None
    warm_s: float | None = None
    rounds_ms: list[list[float]] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    account: dict[str, object] = field(default_factory=dict)

    def ask(self, message: object, within_s: float) -> Any:
        """The worker's answer. If there is none, set `gap` and return None."""
        try:
            return self.worker.ask(message, within_s)
        except WorkerError as error:
            self.gap = str(error)
            return None


def reference(work: Work, effort: Effort, log: Path) -> Facts:
    """Compute eager's results and write them where `compare` finds them. Raises WorkerError if eager cannot run the model."""
    with _start(work, work.folder / "reference", log) as worker:
        facts: Facts = worker.ask(Reference(work), effort.timeout_s)
        return facts


def compare(
    work: Work, facts: Facts, peers: Sequence[Peer], effort: Effort, log: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure the peers. Returns a dict for each, in order: figures, or a "gap", the reason why there are none.

    Times are in milliseconds of one call, memory in MiB. `gflop`: 10^9 floating-point operations of one call. Errors are against eager as
    written. `other_load`: the share of the time for which threads waited for a core. `samples_ms`: every timed call. The output of peers is
    appended to `log`; `say` is called with each step.
    """
    with contextlib.ExitStack() as stack:
        runners = []
        for peer in peers:
            if peer.missing(work.precision):
                continue
            say(f"{peer.title}: preparing")
            cache = effort.cache(work, peer)
            worker = stack.enter_context(_start(work, cache, log))
            runner = _Runner(peer, worker, cache, was_filled=_is_filled(cache))
            runner.ready = runner.ask(_prepare(work, peer), effort.timeout_s)
            runner.gap = runner.gap or (runner.ready.error if runner.ready else "")
            if not runner.gap and cache.exists():
                (cache / _FILLED).touch()
            runners.append(runner)
        _time(runners, effort, say)
        for runner in runners:
            if not runner.gap:
                runner.account = runner.ask(Account(), effort.timeout_s) or {}
            runner.worker.end()
        for runner in runners:
            if runner.peer.name in effort.warm and runner.peer.keeps_cache and not (runner.gap or runner.was_filled):
                say(f"{runner.peer.title}: preparing again, from its cache")
                with contextlib.suppress(WorkerError), _start(work, runner.cache, log) as worker:
                    again = worker.ask(_prepare(work, runner.peer), effort.timeout_s)
                    runner.warm_s = None if again.error else again.compile_s
        results = {runner.peer.name: _result(work, facts, runner) for runner in runners}
        return [
            results.get(peer.name) or identity(work, peer) | {"gap": peer.missing(work.precision)} for peer in peers
        ]


def identity(work: Work, peer: Peer) -> dict[str, Any]:
    """The entries that every result of the peer begins with."""
    return {"batch": work.batch, "peer": peer.name, "threads": work.threads} | {
        "precision": peer.precision or work.precision,
        "day": today(),
    }


@contextlib.contextmanager
def _start(work: Work, cache: Path, log: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(environment(work.threads, cache) | work.variables, log) as worker:
        yield worker


def _prepare(work: Work, peer: Peer) -> Prepare:
    return Prepare(work, peer, work.folder / f"{peer.name}-files")


def _is_filled(cache: Path) -> bool:
    return (cache / _FILLED).exists()


def _time(runners: Sequence[_Runner], effort: Effort, say: Callable[[str], None]) -> None:
    """Time the peers in rounds. Each round starts with another peer, so that no peer always runs first."""
    for index in range(effort.rounds):
        alive = [runner for runner in runners if not runner.gap]
        if not alive:
            return
        say(f"timing, round {index + 1} of {effort.rounds}")
        first = index % len(alive)
        for runner in alive[first:] + alive[:first]:
            wait_until_quiet([other.worker for other in alive])
            timed = runner.ask(Round(effort.seconds / effort.rounds / len(alive)), effort.timeout_s)
            if timed is not None:
                runner.rounds_ms.append([value / 1e6 for value in timed.nanoseconds])
                runner.waited.append(timed.waited)


def _result(work: Work, facts: Facts, runner: _Runner) -> dict[str, Any]:
    result = identity(work, runner.peer)
    if runner.gap or runner.ready is None:
        return result | {"gap": runner.gap}
    medians = [statistics.median(samples) for samples in runner.rounds_ms]
    samples = [value for values in runner.rounds_ms for value in values]
    median = statistics.median(samples)
    first, _, third = _cuts(medians, 4)
    result |= {
        "median_ms": round(median, 5),
        "p90_ms": round(_cuts(samples, 10)[8], 5),
        "spread_ms": round(third - first, 5),
        "items_per_s": None if work.batch is None else round(work.batch / median * 1e3, 3),
        "rounds": len(medians),
        "calls": len(samples),
        "first_call_s": round(runner.ready.first_call_s, 3),
        "compile_warm_s" if runner.was_filled else "compile_cold_s": round(runner.ready.compile_s, 3),
        "import_s": round(runner.ready.import_s, 3),
        "max_error": runner.ready.max_error,
        "rms_error": runner.ready.rms_error,
        "gflop": round(facts.flops / 1e9, 4),
        "other_load": round(statistics.mean(runner.waited), 3),
        **runner.account,
        "samples_ms": samples,
    }
    if runner.warm_s is not None:
        result["compile_warm_s"] = round(runner.warm_s, 3)
    return result


def _cuts(values: Sequence[float], parts: int) -> list[float]:
    """The quantiles that divide the values into `parts` equal parts."""
    return statistics.quantiles(values, n=parts, method="inclusive") if len(values) > 1 else [values[0]] * (parts - 1)
