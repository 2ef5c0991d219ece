"""The committed results of the tests that need TensorRT."""

from __future__ import annotations

import pytest

from tests.engines.tensorrt import result
from tests.engines.tensorrt.result import PAGE, Result, page, sources_now


def test_the_committed_result_is_of_these_sources_and_has_no_failure() -> None:
    """A result with failures fails here. A missing or stale result skips with instructions: nobody without TensorRT is kept from an edit."""
    if not PAGE.exists():
        pytest.skip(f"STALE: there is no {PAGE.name} of the TensorRT engine's tests: make test-tensorrt")
    said = Result.read(PAGE.read_text())
    assert said.failed == 0, f"{said.failed} tests of the TensorRT engine failed on {said.day}: see {PAGE.name}"
    assert said.passed > 100
    if said.sources != sources_now():
        pytest.skip(f"STALE: the TensorRT engine changed since its tests passed on {said.day}: make test-tensorrt")


def test_a_page_says_what_passed_and_what_failed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parametrised tests are counted, other files are no pages, and an edit of any source is noticed."""
    outcomes = {
        "tests/a/test_a.py::test_one[x]": "passed",
        "tests/a/test_a.py::test_one[y]": "passed",
        "tests/a/test_b.py::test_two": "failed",
        "tests/a/test_b.py::test_three": "skipped",
    }
    text = page(outcomes, "torch 2.13", "abc", 12.3, "2026-01-02")
    assert Result.read(text) == Result("abc", "2026-01-02", "torch 2.13", passed=2, failed=1)
    assert "| test_a.py | test_one x2 |" in text
    assert "| **failed** | tests/a/test_b.py::test_two |" in text
    with pytest.raises(ValueError, match="make test-tensorrt"):
        Result.read("something else")
    monkeypatch.setattr(result, "ROOT", tmp_path)
    monkeypatch.setattr(result, "SOURCES", ("package",))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("x = 1\n")
    (tmp_path / "package" / "golden.txt").write_text("1 region\n")
    seen = {sources_now()}
    (tmp_path / "package" / "a.py").write_text("x = 2\n")
    seen.add(sources_now())
    (tmp_path / "package" / "golden.txt").write_text("2 regions\n")
    seen.add(sources_now())
    assert len(seen) == 3
    (tmp_path / "package" / "page.md").write_text("no source\n")
    assert sources_now() in seen


def test_a_page_is_of_what_decides_its_result() -> None:
    """The sources of a page decide its result: partitioning, building, tests and golden files. Every folder exists and has files."""
    for folder in ("core", "partition", "builds", "engines/tensorrt"):
        assert f"torch_hybrid_backend/{folder}" in result.SOURCES
    for folder in result.SOURCES:
        assert any(path.suffix in (".py", ".txt") for path in (result.ROOT / folder).rglob("*")), folder
