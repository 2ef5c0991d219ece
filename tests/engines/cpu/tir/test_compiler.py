"""The kernel compiler module: what it says of itself, and one kernel compiled in this process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.errors import CompileError

ROOT = Path(torch_hybrid_backend.__file__).parent
# What moves bytes and decides nothing of a kernel; see `sources`.
_UTILITIES = {"__init__", "_version", "errors", "machine", "storage", "storage/sources"}


def test_a_kernel_is_compiled(tmp_path: Path) -> None:
    """A library with the kernel under its symbol, and its assembly where that is wanted; the object file is gone."""
    import tvm

    output = tmp_path / "scale.so"
    compiler.compile_kernel(Job("key", "kernel_scale", scale_kernel(64, 2.0), Target.host(), str(output)))
    assert [path.name for path in tmp_path.iterdir()] == ["scale.so"]
    x, out = torch.randn(64), torch.empty(64)
    tvm.runtime.load_module(str(output))["kernel_scale"](x, out)
    torch.testing.assert_close(out, torch.relu(x) * 2)
    compiler.compile_kernel(Job("key", "kernel_scale", scale_kernel(), Target.host(), str(output), assembly=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scale.s", "scale.so"]
    assert "__tvm_ffi_kernel_scale" in (tmp_path / "scale.s").read_text()


def test_a_kernel_that_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match="linker"):
        compiler.compile_kernel(Job("key", "k", scale_kernel(), Target.host(), str(tmp_path / "k.so")))
    assert not list(tmp_path.iterdir())


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing where TVM is not installed."""
    assert compiler.version() == importlib.metadata.version("apache-tvm")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert compiler.version.__wrapped__() == ""


def test_sources_hold_all_that_makes_a_kernel() -> None:
    """Whatever of this package a process without torch loads to compile one lies in `SOURCES`, or is a utility; it starts with TVM's own
    pool of threads at one."""
    assert all((ROOT / source).exists() for source in compiler.SOURCES)
    code = f"""
import json, sys
import {compiler.__name__} as compiler
assert "tvm" not in sys.modules
compiler.load()
assert "tvm" in sys.modules and "torch" not in sys.modules
print(json.dumps([name for name in sys.modules if name.startswith("torch_hybrid_backend.")]))
"""
    environment = {**os.environ, **compiler.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, env=environment, capture_output=True, text=True, check=True
    )
    loaded = [name.split(".", 1)[1].replace(".", "/") for name in json.loads(done.stdout.splitlines()[-1])]
    assert "engines/cpu/tir/emit" in loaded
    own = ("engines", *compiler.SOURCES)
    assert not [n for n in loaded if n not in (*_UTILITIES, *own) and not n.startswith(tuple(f"{s}/" for s in own[1:]))]
    assert compiler.ENVIRONMENT == {"TVM_NUM_THREADS": "1"}
    assert compiler.SUFFIX == ".so"
