"""The settings as a Markdown table, made from the fields of `config.Config`.

python -m tools.settings_table docs/settings.md      # rewrites the table between the two markers of a file
"""

from __future__ import annotations

import sys

from tools.generated import replaced, rewrite
from torch_hybrid_backend.config import PREFIX, setting_fields

START, END = "<!-- settings:start -->", "<!-- settings:end -->"


def settings_table() -> str:
    """A row for each setting."""
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
    """`text` with the table between its markers replaced."""
    return replaced(text, START, END, settings_table())


if __name__ == "__main__":
    rewrite(sys.argv[1:], with_current_table)
