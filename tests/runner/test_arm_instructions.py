"""Files for AArch64 whose kernels multiply bfloat16 and bytes, run by the runner for it under QEMU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.artifact.exported_for_tests import manifest_of
from tests.runner.machines import ARM, Machine, needed

# The same loops run by arithmetic in tests/engines/cpu/tir/test_arm.py and beside their schedules, where the instructions are looked for, too.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def machine() -> Machine:
    return needed(ARM)


# Exports a model to a file, and writes inputs other than its sample's, and what eager computes of them in float32.
_EXPORT = """
import sys
import numpy as np
import torch
from torch import nn
import torch_hybrid_backend

name, precision, target, folder = sys.argv[1:]

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, t, 64))

def network():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 44, 3, 2, groups=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(44, 30, 1), nn.Flatten(), nn.Linear(30 * 49, 10))

make, sizes = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 100)), (9, 64)),
    "row": (lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 100)), (1, 64)),
    "network": (network, (2, 3, 15, 15)),
    "attention": (Attention, (2, 33, 64)),
}[name]
torch.manual_seed(0)
model, x = make().eval(), torch.randn(sizes)
options = {"target": target, "precision": precision, "precision_tolerance": 1.0, "strict": True}
with torch.no_grad():
    torch_hybrid_backend.export(model, (torch.randn(sizes),), f"{folder}/model.hybrid", options=options)
    np.save(f"{folder}/x.npy", x.numpy())
    np.save(f"{folder}/y.npy", model(x).numpy())
"""


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp16"])
@pytest.mark.parametrize("name", ["mlp", "row", "network", "attention"])
def test_reduced_precisions(name: str, precision: str, machine: Machine, tmp_path: Path) -> None:
    """The emulated instructions give the sample's answer, within its tolerance, as the arithmetic did that was checked where the file was
    made; and other inputs what eager computes in float32, as near as the precision is."""
    settings = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _EXPORT, name, precision, "neoverse-v1", tmp_path]
    made = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "out.npy")
    program = machine.folder / "bin/hybrid-run"
    done = machine.runs(program, tmp_path / "model.hybrid", *files, emulator=("-cpu", "max"))
    assert done.returncode == 0, done.stderr
    (sample,) = manifest_of(tmp_path / "model.hybrid").samples
    assert sample.tolerance == {"bf16": 0.05, "int8": 0.01, "fp16": 0.01}[precision]
    expected, out = np.load(tmp_path / "y.npy"), np.load(tmp_path / "out.npy")
    error = np.sqrt(((out - expected) ** 2).mean() / (expected**2).mean())
    assert error < {"bf16": 0.02, "int8": 0.04, "fp16": 0.002}[precision]


def test_a_processor_without_them(machine: Machine, tmp_path: Path) -> None:
    """Kernels with these instructions are refused by name before any is mapped."""
    settings = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _EXPORT, "mlp", "bf16", "neoverse-v1", tmp_path]
    subprocess.run(command, env=settings, capture_output=True, check=True)
    emulator = ("-cpu", "neoverse-n1")
    done = machine.runs(machine.folder / "bin/hybrid-run", tmp_path / "model.hybrid", emulator=emulator)
    assert (done.returncode, '"library" needs "bf16", "i8mm"' in done.stderr) == (1, True), done.stderr
