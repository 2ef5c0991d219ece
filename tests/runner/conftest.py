"""The runner, built by CMake once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.runner.runner_in_python import Runner, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that CMake has installed the runner to, stripped. Neither PyTorch nor Python is looked for.

    What is built stays in build/tests, so that a later run compiles what was changed alone.
    """
    if not (shutil.which("cmake") and shutil.which("g++") and sys.platform == "linux"):
        pytest.skip("needs Linux, cmake and g++")
    # Of the run, where several processes share it.
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent / "runner" if parallel else tmp_path_factory.mktemp("runner")
    folder.mkdir(exist_ok=True)
    build = ROOT / "build/tests" / ("runner-ninja" if _generator() else "runner")
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run("cmake", *_generator(), "-S", ROOT / "csrc/runner", "-B", build)
            run("cmake", "--build", build, "--parallel", "2")
            run("cmake", "--install", build, "--prefix", folder / "installed", "--strip")
            (folder / "done").touch()
    return folder / "installed"


def _generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


@pytest.fixture(scope="session")
def torch_library(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libhybrid_runner_torch.so, which finds LibTorch where the loader looks alone."""
    folder = tmp_path_factory.mktemp("runner_torch")
    options = ["-DHYBRID_RUNNER_TORCH=ON", "-DCMAKE_SKIP_RPATH=ON", f"-DCMAKE_PREFIX_PATH={torch.__path__[0]}"]
    run("cmake", *_generator(), "-S", ROOT / "csrc/runner", "-B", folder, *options)
    run("cmake", "--build", folder, "--parallel", "2", "--target", "hybrid_runner_torch")
    return folder / "libhybrid_runner_torch.so"


@pytest.fixture(scope="session")
def library(installed: Path) -> Path:
    (path,) = installed.glob("lib*/libhybrid_runner.so")
    return path


@pytest.fixture(scope="session")
def runner(library: Path) -> Runner:
    return Runner(library)
