"""Figures of servers: only loads within the limit count."""

from __future__ import annotations

from typing import Any

from benchmarks.serving import report


def test_the_report() -> None:
    """The limit is a multiple of eager's p99 with one client; an engine that is not installed says so."""

    def load(*rows: tuple[int, float, float]) -> list[dict[str, Any]]:
        return [{"clients": n, "per_s": per_s, "p50_ms": p99 / 2, "p99_ms": p99, "count": 9} for n, per_s, p99 in rows]

    rows = [
        {"model": "m", "engine": "eager", "load": load((1, 10, 20), (2, 15, 61))},
        {"model": "m", "engine": "hybrid", "load": load((1, 40, 10), (4, 80, 59.0), (8, 90, 70))},
        {"model": "m", "engine": "openvino", "missing": "not installed"},
    ]
    assert report({"results": rows}, p99_factor=3).splitlines() == [
        "m, eager: one client 10.00 ms (p99 20.00); 10.0 requests/s with p99 below 60.0 ms",
        "m, hybrid: one client 5.00 ms (p99 10.00); 80.0 requests/s with p99 below 60.0 ms",
        "m, openvino: not installed",
    ]
