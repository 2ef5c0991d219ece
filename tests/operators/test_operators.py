"""PyTorch's operators and modules on the TVM engine, forced, and through the default backend: a selection.

`python -m tests.operators.run` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators import opinfos
from tests.operators.execution import NUMBERS, PASSED, SKIPPED, Bench
from tests.operators.selection import SELECTION, check
from tests.operators.tasks import Task, spread


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Kernels that several samples need are compiled once."""
    path: Path = tmp_path_factory.mktemp("kernels")
    return Bench(path, compilers=2)


# Of floats of other widths bfloat16 stays, of what is lazy or complex the kind that is both. `python -m tests.operators.run`, a part of
# `make test-full`, runs all samples of all kinds.
_LONG = ("float64", "float16", "float32 lazy", "complex64 backward")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in _LONG else ()) for kind in SELECTION]
)
def test_agrees_with_eager(kind: str, bench: Bench) -> None:
    """A few samples, spread over all of an operator's or module's, give eager's results; what the table of expected failures lists may fail."""
    check(kind, bench)


@pytest.mark.parametrize("subject", ["add", "floor_divide", "narrow", "select", "slice", "tril", "where"])
def test_agrees_with_eager_for_numbers_known_only_at_run_time(subject: str, tmp_path: Path) -> None:
    """A sample's numbers are others in each call: small, large, negative, zero."""
    samples = opinfos.samples(Task(subject, "int64"))
    bench = Bench(tmp_path / "kernels", compilers=1, modes=(NUMBERS,))
    outcomes = [outcome[NUMBERS] for outcome in bench.run([samples[k] for k in spread(len(samples), 2)])]
    assert {outcome.status for outcome in outcomes} <= {PASSED, SKIPPED}, outcomes
    assert PASSED in {outcome.status for outcome in outcomes}
