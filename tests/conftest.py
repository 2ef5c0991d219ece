"""Fixtures for every test: golden files, a machine that seems quiet."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent

# Triton reads it when it is imported, which torch may do at any moment. Compiler processes compile all the same.
os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP's library reads it when it is loaded. Processes of tests have more threads than there are cores, and threads that wait by spinning
# took half of the processor's time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Golden files of traced graphs are those of one release of torch: others take a few operators apart in another way, or name them so.
TRACED_BY = "2.13."
traced = pytest.mark.skipif(
    not version("torch").startswith(TRACED_BY), reason=f"golden files are of graphs that torch {TRACED_BY}x traces"
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what was imported: collections that go through it again and again were 5 to 10 % of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files with what the tests produce")
    parser.addoption(
        "--golden-texts", type=Path, help="a folder for the full texts of what golden files have hashes of"
    )


@dataclass(frozen=True)
class Golden:
    """The golden file of one test: tests/golden/<the test's file>/<the test's name>.txt."""

    path: Path
    update: bool

    def check(self, actual: str) -> None:
        """Fail where `actual` differs from the file; under --update-golden write the file instead."""
        text = actual.rstrip("\n") + "\n"
        if self.update:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text)
            return
        if not self.path.exists():
            pytest.fail(f"there is no {self.path.relative_to(_TESTS)}: run pytest with --update-golden and review it")
        expected = self.path.read_text()
        assert text == expected, f"differs from {self.path.relative_to(_TESTS)}: if meant so, run with --update-golden"


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other load is not felt in this process: tests run beside each other, and what they keep of timings is to be found."""
    monkeypatch.setattr("torch_hybrid_backend.measuring.other_load.thread_waits", dict)


@pytest.fixture(scope="session")
def kernel_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh cache that all processes of this run share: kernels that several tests need are compiled once."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(kernel_directory: Path) -> Iterator[None]:
    """Set the kernel cache of the run, which processes that tests start use too; the user's own is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_CACHE_DIR", str(kernel_directory))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The golden file that belongs to the test."""
    folder = _TESTS / "golden" / Path(request.node.path).relative_to(_TESTS).with_suffix("")
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    return Golden(folder / f"{name}.txt", request.config.getoption("--update-golden"))


@pytest.fixture
def golden_texts(request: pytest.FixtureRequest) -> Path | None:
    """The folder for full texts; None where none are asked for."""
    folder: Path | None = request.config.getoption("--golden-texts")
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many seconds the tests of each folder took, the longest first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0].rpartition("/")[0]] += report.duration
    if seconds:
        terminalreporter.section("seconds by folder")
        terminalreporter.write_line(", ".join(f"{folder} {took:.0f}" for folder, took in seconds.most_common()))
