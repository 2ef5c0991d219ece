"""The settings as a Markdown table, made from the fields of `config.Config`.

python -m tools.settings_table docs/settings.md      # rewrites the table between the two markers of a file
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch_hybrid_backend.config import PREFIX, setting_fields

START, END = "<!-- settings:start -->", "<!-- settings:end -->"


def settings_table() -> str:
    """One row a setting."""
    lines = ["| option | environment | values | default | meaning |", "|---|---|---|---|---|"]
    for field in setting_fields():
        default = field.metadata["shown_default"] or _shown_default(field.default)
        names = (f"`{field.name}`", f"`{PREFIX}{field.name.upper()}`")
        cells = (*names, field.metadata["values"], default, field.metadata["meaning"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown_default(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def with_current_table(text: str) -> str:
    """`text` with the table between its two markers replaced. Raises ValueError where a marker is missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the file has no {START} ... {END} markers to put the settings table between")
    return f"{before}{START}\n{settings_table()}\n{END}{after}"


def main(names: Sequence[str]) -> None:
    """Rewrite the named files."""
    for name in names:
        path = Path(name)
        path.write_text(with_current_table(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
