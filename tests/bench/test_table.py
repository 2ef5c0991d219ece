"""The tables of `hybrid bench`."""

from __future__ import annotations

from tests.bench.test_record import MACHINE, group, result
from torch_hybrid_backend.bench.record import Group, Record
from torch_hybrid_backend.bench.table import text
from torch_hybrid_backend.bench.worker import Facts


def test_a_table_lines_up_and_is_followed_by_what_it_means() -> None:
    """Rows are aligned, the fastest first. Verdicts and the reasons of runtimes without figures follow."""
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
        "",
        "no result: zentorch: not installed: pip install zentorch",
    ]


def test_what_is_not_installed_is_said_once() -> None:
    """A runtime that is not installed is listed after the last table, with its precisions if it is installed for others. Other reasons stay
    with their table."""
    missing = {"peer": "zentorch", "batch": 8, "gap": "not installed: pip install zentorch"}
    half = {"peer": "inductor", "batch": 8, "gap": "not installed: pip install torchao"}
    wrong = {"peer": "openvino", "batch": 8, "gap": "wrong answer"}
    groups = [
        Group(batch, precision, Facts(0, 8, was_training=False), [result("hybrid", 10.0), missing, *more])
        for batch in (1, 8)
        for precision, more in (("float32", []), ("int8", [half, wrong]))
    ]
    lines = text(Record("m.py:make", False, MACHINE, {}, groups)).splitlines()
    assert lines[-3:] == [
        "",
        "no result: zentorch: not installed: pip install zentorch",
        "no result: inductor in int8: not installed: pip install torchao",
    ]
    assert sum("not installed" in line for line in lines) == 2
    assert lines.count("no result: OpenVINO: wrong answer") == 2
