"""Habits that a reader would have to look for: no test asserts how long something took; docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
_CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
    "time",
    "time_ns",
}


def _reads_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    of_module = (
        isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "time"
    )
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _CLOCKS and (of_module or (isinstance(node.func, ast.Name) and name != "time"))


def _timed_asserts(tree: ast.AST) -> Iterator[int]:
    """Lines of the asserts on a duration: a difference of a clock's readings, or a name for one. Waiting until a time is none."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        readings: set[str] = set()
        durations: set[str] = set()

        def mentions(node: ast.AST, names: set[str]) -> bool:
            return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))

        def is_duration(node: ast.AST, readings: set[str] = readings, durations: set[str] = durations) -> bool:
            differences = (
                part for part in ast.walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
            )
            by_clock = any(any(map(_reads_clock, ast.walk(part))) or mentions(part, readings) for part in differences)
            return by_clock or mentions(node, durations)

        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                names = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
                if is_duration(node.value):
                    durations |= names
                elif _reads_clock(node.value):
                    readings |= names
        yield from (n.lineno for n in ast.walk(function) if isinstance(n, ast.Assert) and is_duration(n.test))


def test_no_test_asserts_a_time() -> None:
    """Machines are shared: such a test fails by chance. Speed is judged in benchmarks/; a test counts steps."""
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in _timed_asserts(ast.parse(path.read_text()))
    ]
    assert not found


def test_the_rule_finds_what_it_forbids() -> None:
    """A duration under any name; waiting with a limit is allowed."""
    text = """
        def test_fast():
            start = time.perf_counter()
            work()
            spent = time.perf_counter() - start
            assert spent < 10

        def test_at_once():
            start = perf_counter()
            assert perf_counter() - start < 1

        def eventually(check):
            until = time.monotonic() + 60
            while not check():
                assert time.monotonic() < until
    """
    assert list(_timed_asserts(ast.parse(textwrap.dedent(text)))) == [6, 10]


# First words that are neither a verb nor the noun that is returned.
_NO_BEGINNING = frozenset("as how if it of one such that they what when where whether which who whose why".split())
# Docstrings that still begin so, by folder. Numbers only fall: who mends some lowers the number.
_STILL = {"benchmarks": 74, "examples": 0, "tests": 846, "tools": 0, "torch_hybrid_backend": 263}


def _first_words(tree: ast.AST) -> Iterator[str]:
    """The first word of each docstring, in small letters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
            if found:
                yield found[1].lower()


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """CONTRIBUTING.md has the rule, and examples."""
    root, found = TESTS.parent, Counter[str]()
    for folder in ("benchmarks", "examples", "tests", "tools", "torch_hybrid_backend"):
        for path in (root / folder).rglob("*.py"):
            words = _first_words(ast.parse(path.read_text()))
            found[folder] += sum(word in _NO_BEGINNING for word in words)
    assert dict(found) == _STILL, "a docstring begins with a verb, or with the noun that is returned; 'True if ...'"
    assert "whether" not in {
        word
        for path in (root / "torch_hybrid_backend").rglob("*.py")
        for word in _first_words(ast.parse(path.read_text()))
    }
