"""The table of Core ATen operators: what it says of some, and that the page is of these sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.operators.core_table import END, START, Forms, core_operators, forms, operator_table, what

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
aten = torch.ops.aten


def test_what_is_said_of_some() -> None:
    """Operators that have kernels, that are taken apart at capture, and that the plan calls, with the code of the reason."""
    found = forms("sort|fft.rfft|softmax|masked_scatter|nn.functional.silu")
    assert found[aten.silu.default].taken > 0 == sum(found[aten.silu.default].refused.values())
    assert what(aten.silu.default, found[aten.silu.default]) == "kernel"
    assert what(aten._softmax.default, Forms()) == "decomposed at capture"
    for operator in (aten.sort.default, aten._fft_r2c.default, aten.masked_scatter.default):
        of = found[operator]
        assert what(operator, of) == "PyTorch's operator"
        assert {code for code, _ in of.refused} == {"library"}
        assert of.called == sum(of.refused.values()) > 0


def test_the_page_has_every_core_operator() -> None:
    """A row for each, none of which is refused as unknown."""
    rows = re.findall(r"^\| `(aten\.\S+)` \|.*$", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [str(operator) for operator in core_operators()]
    assert "unknown_operator" not in PAGE.read_text()


@pytest.mark.full  # a minute; the two tests above cover how it is made
def test_the_page_is_of_these_sources() -> None:
    """The engine says of each operator what the page says."""
    assert f"{START}\n{operator_table(forms())}\n{END}" in PAGE.read_text()
