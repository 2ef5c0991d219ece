"""The C++ side as a whole: its own unit tests, and what the built library asks of PyTorch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import torch_hybrid_backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and g++")
def test_the_cpp_unit_tests_pass(tmp_path: Path) -> None:
    """csrc/tests pass under the address and undefined-behaviour sanitisers."""
    command = ["make", "-C", str(ROOT / "csrc"), "test", f"OUT={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_library_uses_the_stable_abi_only() -> None:
    """No C++ symbol of PyTorch is needed, so that one build serves every torch from 2.11 on."""
    library = Path(torch_hybrid_backend.__file__).parent / "_runtime.so"
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout.split()
    unstable = [name for name in symbols if name.startswith(("_ZN2at", "_ZNK2at", "_ZN3c10", "_ZNK3c10", "_ZN5torch"))]
    assert unstable == []
    assert "torch_parallel_for" in symbols
    assert not any(name.startswith("TVM") for name in symbols)
