"""Versions of sources: which edit is noticed, and that nothing is left out that decides what is kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.services_for_tests import services
from tests.test_layers import PACKAGE, imports_of, room_of
from torch_hybrid_backend.capture.cache import aot_cache
from torch_hybrid_backend.codegen.compiler import compiler_version
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.engines.tensorrt import engine as tensorrt
from torch_hybrid_backend.storage import sources
from torch_hybrid_backend.storage.sources import read_sources_version, sources_version

# Utilities that may be edited freely: they say how something is kept, shown, chosen or refused, not what. What decides of the settings and the
# processor is in keys by its value.
_DECIDE_NOTHING = {
    *(
        "builds",
        "cancellation",
        "config",
        "errors",
        "machine",
        "measuring",
        "processes",
        "progress",
        "services",
        "storage",
        "torch_private",  # names of PyTorch, whose version is in keys; kept graphs count it all the same
    )
}
_PARTS = {"kernels": compiler.SOURCES, "kept graphs": aot_cache.SOURCES, "TensorRT": tensorrt.SOURCES}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, whose versions are asked for instead."""
    copy = tmp_path / "torch_hybrid_backend"
    shutil.copytree(PACKAGE, copy)
    monkeypatch.setattr(sources, "_PACKAGE", copy)
    return copy


@pytest.mark.parametrize(
    ("parts", "edited"),
    [
        (compiler.SOURCES, "sizes/size.py"),
        (compiler.SOURCES, "core/limits.py"),
        (compiler.SOURCES, "loops/lowerings/matmul.py"),
        (compiler.SOURCES, "codegen/anchors.py"),
        (compiler.SOURCES, "engines/cpu/schedules/register_tiles.py"),
        (aot_cache.SOURCES, "core/hoisted_inputs.py"),
        (aot_cache.SOURCES, "capture/decompositions.py"),
        (session.TIMING_SOURCES, "runtime/plan_layout.py"),
        (session.TIMING_SOURCES, "measuring/measure.py"),
        (session.TIMING_SOURCES, "_runtime.so"),
    ],
)
def test_an_edit_is_another_version(parts: Sequence[str], edited: str, package: Path) -> None:
    """A byte more in a source, or in the built runtime, is enough; taken back, the version is the one before."""
    source = package / edited
    text, before = source.read_bytes(), read_sources_version(*parts)
    source.write_bytes(text + b"\n")
    assert read_sources_version(*parts) != before
    source.write_bytes(text)
    assert read_sources_version(*parts) == before


@pytest.mark.parametrize("parts", _PARTS.values(), ids=_PARTS)
def test_an_edit_elsewhere_is_no_other_version(parts: Sequence[str], package: Path) -> None:
    """Reports, the wiring, files beside the package: what was kept stays in use."""
    before = read_sources_version(*parts)
    for name in ("report/text.py", "backend.py", "../benchmarks/models.py", "../tests/test_sources.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("# edited")
    assert read_sources_version(*parts) == before


def test_a_file_added_removed_or_renamed_is_another_version(package: Path) -> None:
    """Also where the bytes of all files together stay the same."""
    versions = {read_sources_version("core")}
    (package / "core" / "added.py").write_text("")
    versions.add(read_sources_version("core"))
    (package / "core" / "added.py").rename(package / "core" / "renamed.py")
    versions.add(read_sources_version("core"))
    (package / "core" / "renamed.py").unlink()
    assert len(versions) == 3
    assert read_sources_version("core") in versions


def test_an_edit_in_another_package_is_another_version(tmp_path: Path) -> None:
    """All Python files of a library that decides what is kept count, whatever folder it lies in."""
    for name in ("one/library", "two/library"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "source.py").write_text("A = 1")
    one, two = (tmp_path / name / "library" for name in ("one", "two"))
    assert read_sources_version(".", package=one) == read_sources_version(".", package=two)
    (two / "inner" / "source.py").write_text("A = 2")
    assert read_sources_version(".", package=one) != read_sources_version(".", package=two)
    assert read_sources_version(".", package=one) != read_sources_version(".")


@pytest.mark.parametrize("parts", _PARTS.values(), ids=_PARTS)
def test_nothing_that_decides_is_left_out(parts: Sequence[str]) -> None:
    """Modules that the named parts import are among them, or a utility that decides nothing."""
    paths = [path for part in parts for path in (PACKAGE / part).rglob("*.py")]
    rooms = {room_of(path) for path in paths}
    files = tuple(tuple(part.removesuffix(".py").split("/")) for part in parts if part.endswith(".py"))
    beyond = {
        (path.name, *parts_)
        for path in paths
        for parts_ in imports_of(path)
        if parts_[0] not in rooms and not any(parts_[: len(file)] == file for file in files)
    }
    assert not {each for each in beyond if each[1] not in _DECIDE_NOTHING}


def test_what_is_kept_is_kept_under_these_versions() -> None:
    """The keys of kernels, of kept graphs, of timings and of TensorRT's verdicts hold them."""
    assert sources_version(*compiler.SOURCES) in compiler_version(compiler)
    assert compiler_version(compiler) in TvmEngine(Config(), services()).version(CPU)
    assert sources_version(*aot_cache.SOURCES) in aot_cache._versions()
    assert sources_version(*tensorrt.SOURCES) in tensorrt.verdict_versions()
