"""The index of decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.adr_index import FOLDER, adr_index, with_current_index


def test_the_page_is_current() -> None:
    """docs/adr/index.md has the table that `python -m tools.adr_index docs/adr/index.md` writes."""
    text = (FOLDER / "index.md").read_text()
    assert with_current_index(text) == text, "run: python -m tools.adr_index docs/adr/index.md"


def test_a_decision_has_a_title_and_a_state(tmp_path: Path) -> None:
    """A page without them is named."""
    (tmp_path / "0001-first.md").write_text("# 1. First\n\nStatus: accepted\n")
    assert adr_index(tmp_path).splitlines()[-1] == "| 1 | [First](0001-first.md) | accepted |"
    (tmp_path / "0002-second.md").write_text("# Second\n")
    with pytest.raises(ValueError, match=r"0002-second\.md has to begin"):
        adr_index(tmp_path)
