"""Metrics of a replica, which Ray exports to Prometheus with the application, the deployment and the replica as labels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import quantiles
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from torch_hybrid_backend.serve.served_model import ServedModel

# Seconds; from calls of small models to slow ones.
_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
# Requests whose times the page shows.
_LAST = 1000


class Metrics:
    """Counters of one replica. Prometheus knows them as `ray_hybrid_...`; the page gets `latency`."""

    def __init__(self) -> None:
        labels: Any = ("model", "digest")  # Ray's annotation knows one label alone
        statuses: Any = ("model", "status")
        self._requests = Counter("hybrid_requests", "Requests answered, by status of HTTP.", statuses)
        self._seconds = Histogram(
            "hybrid_request_seconds", "Seconds from a request to its answer in a replica.", _SECONDS, ("model",)
        )
        self._rows = Histogram("hybrid_batch_rows", "Rows of joined requests.", _ROWS, ("model",))
        self._engine = Histogram("hybrid_engine_seconds", "Seconds of a batch in the model.", _SECONDS, ("model",))
        self._waiting = Gauge("hybrid_waiting", "Requests in a replica that have no answer yet.", ("model",))
        self._python = Gauge("hybrid_fallback_parts", "Parts of the model that only Python can run.", ("model",))
        self._hits = Gauge("hybrid_plan_cache_hits", "Calls whose sizes had a plan.", ("model",))
        self._misses = Gauge("hybrid_plan_cache_misses", "Calls that made a plan for their sizes.", ("model",))
        self._artifact = Gauge("hybrid_artifact", "1 for the file that is served, by its digest.", labels)
        self._failed_swaps = Counter(
            "hybrid_failed_swaps", "Files that could not be served and left the present one.", ("model",)
        )
        self._tokens = Counter("hybrid_generated_tokens", "Tokens of texts that were generated.", ("model",))
        self._under_way = 0
        self._last: deque[float] = deque(maxlen=_LAST)

    @contextmanager
    def request(self, model: ServedModel) -> Iterator[None]:
        """Time a request."""
        labels = {"model": model.name}
        start = time.perf_counter()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            seconds = time.perf_counter() - start
            self._last.append(seconds)
            self._seconds.observe(seconds, labels)
            self._waiting.set(self._under_way, labels)

    def answered(self, model: ServedModel, status: int) -> None:
        """Count an answer."""
        self._requests.inc(1, {"model": model.name, "status": str(status)})

    def generated(self, model: ServedModel) -> None:
        """Count a token."""
        self._tokens.inc(1, {"model": model.name})

    def batch(self, model: ServedModel, rows: int, seconds: float) -> None:
        """Record a batch that the model has run."""
        labels = {"model": model.name}
        self._rows.observe(rows, labels)
        self._engine.observe(seconds, labels)
        hits, misses = model.plan_cache
        self._hits.set(hits, labels)
        self._misses.set(misses, labels)

    def swapped(self, model: ServedModel, before: ServedModel | None = None) -> None:
        """Tell which file is served from now on."""
        if before is not None:
            self._artifact.set(0, {"model": before.name, "digest": before.model.digest})
        self._artifact.set(1, {"model": model.name, "digest": model.model.digest})
        self._python.set(model.fallback_parts, {"model": model.name})

    def swap_failed(self, model: ServedModel) -> None:
        """Count a file that could not be served."""
        self._failed_swaps.inc(1, {"model": model.name})

    def latency(self) -> dict[str, float]:
        """Milliseconds of the last requests of this replica: p50 and p99, and their number; only that if there were fewer than two."""
        return percentiles(self._last)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds, and the count; only that for fewer than two."""
    if len(seconds) < 2:
        return {"count": len(seconds)}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"count": len(seconds), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
