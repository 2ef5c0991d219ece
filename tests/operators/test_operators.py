"""PyTorch's operators and modules on the TVM engine, forced, and through the default backend: a selection.

`python -m tests.operators.run` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators.execution import Bench
from tests.operators.selection import SELECTION, check


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Kernels that several samples need are compiled once."""
    path: Path = tmp_path_factory.mktemp("kernels")
    return Bench(path, compilers=2)


@pytest.mark.parametrize("kind", SELECTION)
def test_agrees_with_eager(kind: str, bench: Bench) -> None:
    """A few samples, spread over all of an operator's or module's, give eager's results; what the table of expected failures lists may fail."""
    check(kind, bench)
