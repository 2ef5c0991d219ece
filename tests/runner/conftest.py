"""The runner, built by CMake once per session."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.runner.runner_in_python import Runner, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that CMake has installed the runner to, stripped. Neither PyTorch nor Python is looked for."""
    if not (shutil.which("cmake") and shutil.which("g++") and sys.platform == "linux"):
        pytest.skip("needs Linux, cmake and g++")
    folder = tmp_path_factory.mktemp("runner")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", *generator, "-S", ROOT / "csrc/runner", "-B", folder / "build")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    run("cmake", "--install", folder / "build", "--prefix", folder / "installed", "--strip")
    return folder / "installed"


@pytest.fixture(scope="session")
def library(installed: Path) -> Path:
    (path,) = installed.glob("lib*/libhybrid_runner.so")
    return path


@pytest.fixture(scope="session")
def runner(library: Path) -> Runner:
    return Runner(library)
