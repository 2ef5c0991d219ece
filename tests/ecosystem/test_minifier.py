"""PyTorch's minifier reduces a program that this backend gets wrong to the operator that is wrong.

`TORCHDYNAMO_REPRO_AFTER=dynamo` is meant; "aot" is PyTorch's minifier for inductor alone, which calls inductor by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem import planted_engine

_ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = """
import torch

@torch.compile(backend="hybrid")
def program(x, w):
    y = torch.relu(x @ w) + 1
    gate = torch.sigmoid(y - 2)
    return torch.tanh(gate * y).sum(0)

torch.manual_seed(0)
with torch.no_grad():
    program(torch.randn(7, 5), torch.randn(5, 6))
"""


def _run(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{folder}",
        "HYBRID_ENGINES": planted_engine.NAME,
        "HYBRID_VERIFY": "off",
        "TORCHDYNAMO_REPRO_LEVEL": "4",
        **environment,
    }
    return subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.full  # three processes, each importing and compiling
def test_wrong_operator_is_isolated(tmp_path: Path) -> None:
    """A program fails its accuracy check; the launcher that torch writes cuts it to the sigmoid; the cut program fails, too."""
    planted_engine.install(tmp_path)
    (tmp_path / "program.py").write_text(_PROGRAM)
    failed = _run(tmp_path, "program.py", TORCHDYNAMO_REPRO_AFTER="dynamo")
    assert failed.returncode != 0
    assert "AccuracyError" in failed.stderr
    (launcher,) = tmp_path.rglob("minifier_launcher.py")
    assert "backend='hybrid'" in launcher.read_text()
    minified = _run(tmp_path, str(launcher))
    assert minified.returncode == 0, minified.stderr
    repro = (tmp_path / "repro.py").read_text()
    forward = repro[repro.index("def forward") : repro.index("mod = Repro()")]
    assert "torch.sigmoid" in forward
    assert not any(name in forward for name in ("relu", "tanh", "matmul", " @ ", "sum"))
    assert "AccuracyError" in _run(tmp_path, "repro.py").stderr
    fixed = _run(tmp_path, "repro.py", HYBRID_ENGINES="eager")
    assert fixed.returncode == 0, fixed.stderr


def test_the_gate_catches_it(tmp_path: Path) -> None:
    """With results verified, as they are by default, the same program fails no accuracy check: eager takes the region."""
    planted_engine.install(tmp_path)
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = _run(tmp_path, "program.py", TORCHDYNAMO_REPRO_AFTER="dynamo", HYBRID_VERIFY="first")
    assert done.returncode == 0, done.stderr
    assert "cannot run on planted: accuracy" in done.stderr
    assert not list(tmp_path.rglob("minifier_launcher.py"))
