"""The command `hybrid` as Markdown, made from its parser.

python -m tools.commands_page docs/commands.md      # rewrites what is between the two markers of a file
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_hybrid_backend.cli import parser

START, END = "<!-- commands:start -->", "<!-- commands:end -->"


def commands_page(parser: argparse.ArgumentParser) -> str:
    """A section for each subcommand: what it does, how it is called, and a row for each argument."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    return "\n\n".join(_section(command, helps[name]) for name, command in commands.choices.items() if name in helps)


def _section(command: argparse.ArgumentParser, meaning: str) -> str:
    arguments = [action for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    # One line, however wide the terminal is that this runs in.
    command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=10_000)
    usage = command.format_usage().removeprefix("usage: ").strip()
    rows = [f"| `{_name(action)}` | {_meaning(command, action)} |" for action in arguments]
    table = ["", "| argument | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join(
        [f"## `{command.prog}`", "", f"{meaning[:1].upper()}{meaning[1:]}.", "", "```text", usage, "```", *table]
    )


def _name(action: argparse.Action) -> str:
    taken = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    shown = taken if isinstance(taken, str) else " ".join(taken)
    return " ".join(filter(None, [", ".join(action.option_strings), shown])) if action.option_strings else action.dest


def _meaning(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    # As `--help` has it: with defaults put in.
    text = command._get_formatter()._expand_help(action) if action.help else ""
    return text.replace("|", "\\|")


def with_current_commands(text: str) -> str:
    """`text` with what is between its two markers replaced. Raises ValueError where a marker is missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the file has no {START} ... {END} markers to put the commands between")
    return f"{before}{START}\n{commands_page(parser())}\n{END}{after}"


def main(names: Sequence[str]) -> None:
    """Rewrite the named files."""
    for name in names:
        path = Path(name)
        path.write_text(with_current_commands(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
