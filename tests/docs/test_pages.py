"""The code on the pages runs: Python blocks in order in one namespace, and the commands `hybrid ...` of shell blocks.

A block whose first line is `# name.py` is written to that file too, for commands and blocks that follow. What a page does not show but needs
(a model, data) stands in a comment: `<!-- invisible-code-block: python`. Each page runs in a folder of its own.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from unittest import SkipTest, mock

import pytest
import torch
from sybil import Example
from sybil.document import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from torch_hybrid_backend.cli import main, parser

ROOT = Path(__file__).parents[2]
# Pages whose blocks are not run, and why.
NOT_RUN = {
    "docs/adr": "decisions as they were taken: they show the code of their day",
}
# These compile a model of some size, or several.
SLOW = {
    "README.md",
    "docs/tutorial.md",
    "docs/guides/generation.md",
    "docs/guides/quantization.md",
    "docs/guides/servers.md",
    "docs/guides/troubleshooting.md",
    "docs/guides/training.md",
}
_FENCE = re.compile(r"^[ 	]*```(.*)$", re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.py)\n")


def _is_run(path: Path) -> bool:
    name = str(path.relative_to(ROOT))
    return not any(name == left_out or name.startswith(f"{left_out}/") for left_out in NOT_RUN)


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if _is_run(path)]


def _run_python(example: Example) -> None:
    if (named := _FILE.match(example.parsed)) is not None:
        Path(named[1]).write_text(example.parsed)
    PythonEvaluator()(example)


def _run_shell(example: Example) -> None:
    """Run the commands `hybrid ...` of a block; what else it has (pip, make, docker) is not run."""
    for line in example.parsed.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] != ["hybrid"]:
            continue
        # `hybrid cache` may clear it: not the user's.
        cache = {"HYBRID_CACHE_DIR": str(Path.cwd() / "cache")} if command[1] == "cache" else {}
        with mock.patch.dict(os.environ, cache):
            assert main(command[1:]) == 0, line


def document_of(path: Path) -> Document:
    """Return a page with its blocks."""
    parsers = (CodeBlockParser("python", _run_python), CodeBlockParser("shell", _run_shell), SkipParser())
    document = Document.parse(str(path), *parsers)
    document.namespace["commands"] = set(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    return document


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if name in SLOW else (), id=name)
        for path in PAGES
        for name in [str(path.relative_to(ROOT))]
    ],
)
def test_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page runs, in order, as a reader would run it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HYBRID_MEASURE_BUDGET_S", "0.02")  # no page says which engine wins
    torch._dynamo.reset()
    torch.manual_seed(0)
    document = document_of(path)
    examples = list(document)
    languages = _FENCE.findall(document.text)[::2]  # every other fence ends a block
    # C++ is compiled by tests/runner/test_runner.py.
    assert set(languages) <= {"python", "shell", "text", "dockerfile", "cpp", "yaml"}, (
        "a block that says no more than its language"
    )
    shown = sum(document.text[example.start : example.end].lstrip().startswith("```") for example in examples)
    assert shown == languages.count("python") + languages.count("shell")
    left_out = []
    for example in examples:
        try:
            example.evaluate()
        except SkipTest as skipped:
            left_out.append(f"line {example.line}: {skipped}")
    if left_out:
        pytest.skip("; ".join(left_out))


def test_exceptions_exist() -> None:
    """Neither list names a page that is gone."""
    assert all((ROOT / name).exists() for name in [*NOT_RUN, *SLOW])
