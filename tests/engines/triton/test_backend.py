"""The backend's choices, and what it refuses without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.engines.tvm.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import NULL, DeviceLaunch
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported
from torch_hybrid_backend.engines.triton.artifact import Header, write
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.host_driver import HostLaunch
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_not_there() -> None:
    """A reason of its own: nothing is missing that could be installed."""
    verdict = TritonBackend().available()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.NO_DEVICE
    assert dict(TritonBackend().describe())["GPU"] == "none"


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    verdict = TritonBackend(Target(90, 132)).available()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.MISSING_DEPENDENCY
    assert "pip install" in verdict.why


def test_where_kernels_run() -> None:
    """On the first GPU; interpreted ones on the CPU."""
    assert TritonBackend(Target(90, 132)).device == Device("cuda", 0)
    assert TritonBackend(INTERPRETER).device == CPU
    pytest.importorskip("triton")
    assert isinstance(TritonBackend(INTERPRETER).available(), Supported)


@pytest.mark.parametrize("target", [Target(90, 132), Target(90, 132, is_interpreted=True)])
def test_a_kernel_is_a_launch(target: Target, tmp_path: Path) -> None:
    """As many programs as there are blocks, with what the compiler says that they need; Triton's two scratch addresses are null."""
    path = tmp_path / "a.kernel"
    write(path, Header("", "scale_0d1d", {"x": "*fp32", "y": "*fp32"}, {}, 256, 4096), b"code")
    step = TritonBackend(target).step(scale_kernel(5000), Artifact(str(path), "scale", "key"), (3, 7))
    assert type(step) is (HostLaunch if target.is_interpreted else DeviceLaunch)
    assert isinstance(step, DeviceLaunch)
    assert (step.module, step.symbol, step.arguments, step.writes) == (str(path), "scale_0d1d", (3, 7), 1)
    assert (step.grid, step.threads, step.shared_bytes, step.scratch) == ((5, 1, 1), 256, 4096, (NULL, NULL))
