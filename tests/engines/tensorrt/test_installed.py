"""Messages about the installation of TensorRT: each fault is one sentence that says what to install. Nothing is imported."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.tensorrt import installed
from torch_hybrid_backend.engines.tensorrt.installed import NO_GPU, Installation, described, installation

_RTX = {"torch-tensorrt-rtx": "2.13.0", "tensorrt_rtx_cu13": "1.5.0.114", "torch": "2.13.0+cpu", "dllist": "2.0.0"}
_NEEDS = ["torch<2.14.0,>=2.13.0", "tensorrt_rtx<1.6.0.0,>=1.5.0.114", "dllist", "executorch>=1.3; extra == 'all'"]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Install these distributions, by version, with or without the shared library."""

    def install(versions: Mapping[str, str], *, has_library: bool = True, has_module: bool = True) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        def find_spec(name: str) -> SimpleNamespace | None:
            return SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if has_module else None

        if has_library:
            for flavour in installed.FLAVOURS:
                (tmp_path / f"lib{flavour.library}.so.1").touch()
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: _NEEDS)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(installed, "find_library", lambda name: None)

    return install


def _why() -> str:
    found = installation()
    assert isinstance(found, Refused)
    assert found.code is Reason.MISSING_DEPENDENCY
    return found.why


def test_a_whole_installation(installs) -> None:
    """The text names the distribution, TensorRT and both versions. The distribution for a CUDA version stands for TensorRT's own."""
    installs(_RTX)
    found = installation()
    assert found == Installation(installed.FLAVOURS[1], "2.13.0", "1.5.0.114")
    assert found.release == "2.13"
    assert described()[0] == ("tensorrt", "TensorRT-RTX 1.5.0.114, torch-tensorrt-rtx 2.13.0")
    assert described()[1:] == (("GPU", "none"),)
    assert described(["H200"])[1:] == (("GPU", "H200"),)
    installs(
        {
            "torch-tensorrt": "2.13.0",
            "tensorrt": "10.14.1",
            "torch": "2.13.0",
            "dllist": "2.0.0",
            "tensorrt_rtx": "1.5.1",
        }
    )
    assert str(installation()) == "TensorRT 10.14.1, torch-tensorrt 2.13.0"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch-tensorrt-rtx": ""}, "pip install torch-tensorrt, or torch-tensorrt-rtx"),
        ({"torch-tensorrt": "2.13.0"}, "torch-tensorrt and torch-tensorrt-rtx are both installed"),
        ({"torch-tensorrt-rtx": "2.10.1"}, "must be one of 2.11, 2.12, 2.13, 2.14"),
        ({"torch": "2.12.1"}, "pip install 'torch<2.14.0,>=2.13.0'"),
        ({"tensorrt_rtx_cu13": "1.4.0.76"}, "pip install 'tensorrt_rtx<1.6.0.0,>=1.5.0.114'"),
        ({"tensorrt_rtx_cu13": "", "dllist": ""}, "pip install 'tensorrt_rtx<1.6.0.0,>=1.5.0.114' 'dllist'"),
    ],
)
def test_what_is_missing_or_does_not_fit(installs, change: dict[str, str], says: str) -> None:
    """A missing or unsuitable part is one sentence, with what to install. Requirements of extras do not count."""
    installs({name: version for name, version in {**_RTX, **change}.items() if version})
    assert says in _why()
    assert described() == (("GPU", "none"),)  # what is wrong is told already
    # The session's engine refuses with that sentence, whoever asks for it: `hybrid doctor` prints it, others take over.
    named = dataclasses.replace(Config(), engines=("tensorrt", "eager"))
    assert dict(session.ENGINES)["tensorrt"](named, services()).available() == installation()


def test_a_stub_without_libraries(installs) -> None:
    """TensorRT's distributions on PyPI may be stubs: the bindings are installed, the library is not."""
    installs(_RTX, has_library=False)
    assert "without its library libtensorrt_rtx" in _why()
    installs(_RTX, has_module=False)
    assert "pip install tensorrt_rtx" in _why()
    assert NO_GPU.code is Reason.NO_DEVICE


def test_nothing_of_it_is_imported() -> None:
    """Neither the query of the installation nor compiling for the CPU imports TensorRT, even if the engine is named."""
    program = """
import sys, torch
from torch_hybrid_backend.engines.tensorrt.installed import described
from torch_hybrid_backend.backend import hybrid
described()
torch.compile(torch.nn.ReLU(), backend=hybrid, options={"engines": "eager"})(torch.ones(2))
assert not [name for name in sys.modules if name.endswith("tensorrt.engine")]
torch.compile(torch.nn.Tanh(), backend=hybrid, options={"engines": "tensorrt,eager"})(torch.ones(2))
wrong = [name for name in sys.modules if name.split(".")[0] in ("tensorrt", "tensorrt_rtx", "torch_tensorrt")]
assert not wrong, wrong
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def _doctor(folder: Path) -> list[str]:
    """The lines of `hybrid doctor` about this engine, as a user sees them."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_")}
    told = subprocess.run(
        [sys.executable, "-m", "torch_hybrid_backend.cli", "doctor"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env={**settings, "HYBRID_CACHE_DIR": str(folder / "cache")},
    ).stdout.splitlines()
    first = next(number for number, line in enumerate(told) if line.startswith("  tensorrt "))
    engines = range(first + 1, len(told))
    after = next(number for number in engines if not told[number].startswith("    "))
    return [" ".join(line.split()) for line in told[first:after]]


def _gpus() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"GPU {torch.cuda.get_device_name(index)}" for index in range(count)] or ["GPU none"]


@pytest.mark.tensorrt
def test_doctor_tells_what_is_installed(tmp_path: Path) -> None:
    """`hybrid doctor` shows both versions that engines depend on. Without a GPU, it says that the GPU is missing, not TensorRT."""
    state, version, *gpus = _doctor(tmp_path)
    can_run = "tensorrt can run" if torch.cuda.is_available() else f"tensorrt cannot run: {NO_GPU.why}"
    assert state == can_run
    assert re.fullmatch(r"tensorrt TensorRT(-RTX)? [\d.]+, torch-tensorrt(-rtx)? [\d.]+(\+\w+)?", version)
    assert version == f"tensorrt {installation()}"
    assert gpus == _gpus()


@pytest.mark.skipif(not isinstance(installation(), Refused), reason="TensorRT is installed")
def test_doctor_tells_what_to_install(tmp_path: Path) -> None:
    """The doctor says once what to install if TensorRT is missing or incomplete."""
    state, *gpus = _doctor(tmp_path)
    assert state == f"tensorrt cannot run: {_why()}"
    assert "pip install" in state
    assert gpus == _gpus()
