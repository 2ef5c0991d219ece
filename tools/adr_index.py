"""The index of decisions, made from their titles and states.

python -m tools.adr_index docs/adr/index.md      # rewrites the table between the two markers of a file
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.generated import replaced, rewrite

FOLDER = Path(__file__).parents[1] / "docs" / "adr"
START, END = "<!-- decisions:start -->", "<!-- decisions:end -->"


def adr_index(folder: Path = FOLDER) -> str:
    """A row for each decision of a folder: number, title, state. Raises ValueError for a file without a title or a state."""
    lines = ["| number | decision | state |", "|---:|---|---|"]
    for path in sorted(folder.glob("[0-9]*.md")):
        text = path.read_text()
        title, state = re.match(r"# (\d+)\. (.+)\n", text), re.search(r"^Status: (.+?)$", text, re.MULTILINE)
        if title is None or state is None:
            raise ValueError(
                f"{path.name} has to begin with '# <number>. <title>', and to have a line 'Status: <state>'"
            )
        lines.append(f"| {title[1]} | [{title[2]}]({path.name}) | {state[1]} |")
    return "\n".join(lines)


def with_current_index(text: str) -> str:
    """`text` with the table between its markers replaced."""
    return replaced(text, START, END, adr_index())


if __name__ == "__main__":
    rewrite(sys.argv[1:], with_current_index)
