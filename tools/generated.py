"""Generated parts of pages, between two markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def replaced(text: str, start: str, end: str, part: str) -> str:
    """`text` with what stands between its two markers replaced by `part`. Raises ValueError where a marker is missing."""
    before, opening, rest = text.partition(start)
    _, closing, after = rest.partition(end)
    if not (opening and closing):
        raise ValueError(f"the file has no {start} ... {end} markers to put the generated part between")
    return f"{before}{start}\n{part}\n{end}{after}"


def rewrite(names: Sequence[str], current: Callable[[str], str]) -> None:
    """Rewrite the named files with `current` of their text."""
    for name in names:
        path = Path(name)
        path.write_text(current(path.read_text()))
