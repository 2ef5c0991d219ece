"""The text of a program as it is written, and its function."""

from __future__ import annotations

import sys
from pathlib import Path

from torch_hybrid_backend.engines.triton.source import Lines, function_of


def test_lines_are_indented_where_they_stand() -> None:
    """A block's body is one step further in; names are used once."""
    lines = Lines()
    lines.add("a = 1")
    with lines.block("for i in range(3):"):
        lines.add("a += i")
    lines.add("return a")
    assert lines.text == "    a = 1\n    for i in range(3):\n        a += i\n    return a"
    assert len({lines.name() for _ in range(5)} | {lines.name("acc")}) == 6


def test_a_function_knows_its_file(tmp_path: Path) -> None:
    """Its module is not left behind among the process's modules."""
    function = function_of("def kernel():\n    return 7\n", "kernel", tmp_path)
    assert function() == 7
    assert function.__code__.co_filename == str(tmp_path / "kernel.py")
    assert "kernel" not in sys.modules
