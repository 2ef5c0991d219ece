"""The table of errors in the documentation, and how it is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compiling import by_estimate, fresh_dynamo
from tools.function_errors import BINARY, END, START, UNARY, errors, samples, with_current_table

__all__ = ["by_estimate", "fresh_dynamo"]

_PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def _rows() -> dict[str, list[str]]:
    _, _, rest = _PAGE.read_text().partition(START)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in rest.partition(END)[0].strip().splitlines()[2:]
    ]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize(
    ("dtype", "column", "count"),
    [(torch.float32, 0, 20_000), pytest.param(torch.float64, 3, 100, marks=pytest.mark.full)],
    ids=str,
)
def test_the_page_is_true(dtype: torch.dtype, column: int, count: int) -> None:
    """No function is further off than docs/numerics.md says, but for another processor's library; none is wrongly infinite or NaN."""
    rows = _rows()
    assert set(rows) == {*UNARY, *BINARY}, "run: python -m tools.function_errors docs/numerics.md"
    for name, found in errors(dtype, count).items():
        assert found.wrong == 0, name
        assert found.ulps <= 1.2 * float(rows[name][column]) + 0.3, name


def test_samples_reach_every_size() -> None:
    """Denormal and huge numbers, both signs, and infinities; no NaN."""
    for dtype in (torch.float32, torch.float64):
        x, y = samples(dtype, 1000)
        assert x.shape == y.shape
        assert not (x.isnan() | y.isnan()).any()
        assert x.isinf().any()
        assert ((x != 0) & (x.abs() < torch.finfo(dtype).tiny)).any()
        assert (x.abs() > torch.finfo(dtype).max / 1e3).any()


def test_a_page_without_markers_is_an_error() -> None:
    """There is nowhere to put the table."""
    with pytest.raises(ValueError, match="markers"):
        with_current_table("nothing here")
