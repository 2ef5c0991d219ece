"""The messages that the page on troubleshooting explains are those of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)


def _texts() -> str:
    """Return every string of the package, and the constant parts of those that are formatted."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "torch_hybrid_backend").rglob("*.py"))
    strings = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(string for string in strings if isinstance(string, str))


@pytest.mark.parametrize("section", ["No speed-up", "Warnings", "Errors"])
def test_messages_are_those_of_the_package(section: str) -> None:
    """Each part of a quoted message, between its dots, is in a string of the package."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    part = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    quoted = [text for row in _ROW.findall(part) for text in re.findall(r"`([^`]+)`", row)]
    pieces = {piece.strip(" :") for text in quoted for piece in re.split(r"\.\.\.|: ", text)} - {""}
    known = _texts()
    assert len(pieces) >= 2
    assert not [piece for piece in sorted(pieces) if piece not in known]
