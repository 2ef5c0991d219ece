"""docs/commands.md says what the parser of `hybrid` says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tools.commands_page import commands_page, main, with_current_commands

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_current() -> None:
    """docs/commands.md has what `python -m tools.commands_page docs/commands.md` writes."""
    text = PAGE.read_text()
    assert with_current_commands(text) == text, "run: python -m tools.commands_page docs/commands.md"


def test_a_section_has_usage_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positional arguments, options with values and defaults, flags, and a bar in a help text; hidden ones are left out."""
    monkeypatch.setenv("COLUMNS", "20")
    parser = argparse.ArgumentParser(prog="tool")
    run = parser.add_subparsers().add_parser("run", help="run it")
    run.add_argument("target", help="what to run")
    run.add_argument("--seconds", type=float, default=3.0, help="time for a|b (%(default)s)")
    run.add_argument("--fast", action="store_true", help="be fast")
    run.add_argument("--secret", help=argparse.SUPPRESS)
    assert commands_page(parser) == "\n".join(
        [
            "## `tool run`",
            "",
            "Run it.",
            "",
            "```text",
            "tool run [-h] [--seconds SECONDS] [--fast] target",
            "```",
            "",
            "| argument | meaning |",
            "|---|---|",
            "| `target` | what to run |",
            "| `--seconds SECONDS` | time for a\\|b (3.0) |",
            "| `--fast` | be fast |",
        ]
    )


def test_a_file_without_markers_is_refused(tmp_path: Path) -> None:
    """A file with no place for the commands stays as it is."""
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match=r"no <!-- commands:start --> \.\.\. <!-- commands:end --> markers"):
        main([str(page)])
    assert page.read_text() == "text"
