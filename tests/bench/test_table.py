"""The tables of the command."""

from __future__ import annotations

from tests.bench.test_record import MACHINE, group, result
from torch_hybrid_backend.bench.record import Record
from torch_hybrid_backend.bench.table import milliseconds, text


def test_a_table_lines_up_and_is_followed_by_what_it_means() -> None:
    """The fastest first; who is faster, and why others have no figures."""
    gap = {"peer": "zentorch", "batch": 8, "gap": "not installed: pip install zentorch"}
    found = group(result("eager", 20.0), gap, result("hybrid", 10.0, rms_error=None))
    lines = text(Record("m.py:make", False, MACHINE, {}, [found])).splitlines()
    assert lines[0] == "m.py:make, inference"
    assert lines[1] == "EPYC, 2 threads, AVX2; torch 2.13; 2026-11-28"
    assert lines[3:] == [
        "batch 8, as-written",
        "",
        "| runtime | median ms | spread ms | x eager | first call s | peak MiB |   error |",
        "| ------- | --------: | --------: | ------: | -----------: | -------: | ------: |",
        "| hybrid  |      10.0 |     0.100 |    2.00 |          1.5 |      300 |       - |",
        "| eager   |      20.0 |     0.100 |    1.00 |          1.5 |      300 | 1.0e-07 |",
        "",
        "hybrid is fastest: 2.00x eager.",
        "no result: zentorch: not installed: pip install zentorch",
    ]


def test_milliseconds() -> None:
    """Short ones have more digits."""
    assert [milliseconds(value) for value in (0.12345, 1.2345, 123.45)] == ["0.123", "1.23", "123.5"]
