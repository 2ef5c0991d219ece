"""The table of settings in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.settings_table import END, START, settings_table, with_current_table
from torch_hybrid_backend.config import setting_fields

_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    """docs/settings.md has the table that `python -m tools.settings_table docs/settings.md` writes."""
    text = _PAGE.read_text()
    assert with_current_table(text) == text, "run: python -m tools.settings_table docs/settings.md"


def test_the_table_goes_between_the_markers() -> None:
    """Only what is between the markers changes; without markers it is an error."""
    text = with_current_table(f"a\n{START}\nold\n{END}\nb\n")
    assert text == f"a\n{START}\n{settings_table()}\n{END}\nb\n"
    assert all(f"HYBRID_{field.name.upper()}" in text for field in setting_fields())
    with pytest.raises(ValueError, match="markers"):
        with_current_table("nothing here")
