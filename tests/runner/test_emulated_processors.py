"""Files for levels of x86-64 on processors that QEMU emulates, which end a process at an instruction that they lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.artifact.exported_for_tests import FAST, manifest_of
from tests.runner.runner_in_python import run
from torch_hybrid_backend.engines.cpu.target import Target

QEMU = shutil.which("qemu-x86_64")
V2, V3, V4 = "x86-64-v2", "x86-64-v3", "x86-64-v4"
# Processors of QEMU: one with AVX2 and without AVX-512, one without AVX.
HASWELL, NEHALEM = "Haswell", "Nehalem"
LACKS_AVX512 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
LACKS_AVX = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64: apt-get install qemu-user"),
    pytest.mark.skipif(
        not set(Target.named(V4).features) <= set(Target.host().features), reason=f"this processor is below {V4}"
    ),
]

MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        ),
        (2, 3, 32, 32),
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16)),
        (8, 64),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (2, 16, 64)),
}

# Prints what `load` of a file and `torch.compile` say.
_USES = """
import torch, torch_hybrid_backend
from torch_hybrid_backend.errors import HybridError
compiled = torch.compile(torch.nn.Linear(8, 8), backend="hybrid")
for use in (lambda: torch_hybrid_backend.load({path!r}), lambda: compiled(torch.ones(8, 8))):
    try:
        use()
    except HybridError as error:
        print(error)
"""


def _exported(name: str, *levels: str, folder: Path, precision: str = "as-written") -> tuple[Path, torch.Tensor]:
    """A file of a model for levels, and inputs other than its samples."""
    torch.manual_seed(0)
    make, sizes = MODELS[name]
    path = folder / f"{name}.hybrid"
    options = {**FAST, "target": levels, "precision": precision, "precision_tolerance": 1.0}
    torch_hybrid_backend.export(make().eval(), (torch.randn(sizes),), path, options=options)
    return path, torch.randn(sizes)


def _emulated(processor: str, *command: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a program on an emulated processor. OPENBLAS_CORETYPE would hold NumPy to the kernels of another one."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    return subprocess.run(
        [str(QEMU), "-cpu", processor, *map(str, command)],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("precision", ["as-written", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_avx2_runs_files_of_its_level(name: str, precision: str, installed: Path, tmp_path: Path) -> None:
    """A processor without AVX-512 and SHA instructions gets the answers of this one, as near as the file demands of its samples."""
    path, x = _exported(name, V3, folder=tmp_path, precision=precision)
    np.save(tmp_path / "x.npy", x.numpy())
    done = _emulated(
        HASWELL, installed / "bin/hybrid-run", path, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = torch_hybrid_backend.load(path)(x).numpy()
    (sample,) = manifest_of(path).samples
    error = np.abs(np.load(tmp_path / "y.npy") - expected).max()
    assert error <= sample.tolerance * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["as-written", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_each_processor_runs_its_own_of_one_file(name: str, precision: str, installed: Path, tmp_path: Path) -> None:
    """The runner takes the best level that the processor supports, before any code is mapped, as `load` does."""
    path, x = _exported(name, V2, V3, V4, folder=tmp_path, precision=precision)
    np.save(tmp_path / "x.npy", x.numpy())
    program, files = installed / "bin/hybrid-run", ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy")
    with torch.no_grad():
        loaded = torch_hybrid_backend.load(path)
        expected = loaded(x).numpy()
    (sample,) = loaded.manifest.samples
    assert loaded.manifest.targets[0].library == f"{V4}/library"
    assert run(program, path, "--inspect").startswith(f"kernels: {V4}/library\n")
    for processor, level in ((HASWELL, V3), (NEHALEM, V2)):
        shown = _emulated(processor, program, path, "--inspect")
        assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, f"kernels: {level}/library"), shown.stderr
        done = _emulated(processor, program, path, *files)
        assert done.returncode == 0, done.stderr
        error = np.abs(np.load(tmp_path / "y.npy") - expected).max()
        allowed = sample.tolerance if precision == "as-written" else 0.05  # levels differ in what they have for bytes
        assert error <= allowed * np.abs(expected).max()


@pytest.mark.parametrize(
    ("processor", "level", "lacking"),
    [
        (HASWELL, V4, LACKS_AVX512),
        (NEHALEM, V3, LACKS_AVX),
        (NEHALEM, V4, tuple(sorted((*LACKS_AVX, *LACKS_AVX512)))),
    ],
)
def test_a_level_that_the_processor_lacks(
    processor: str, level: str, lacking: tuple[str, ...], installed: Path, tmp_path: Path
) -> None:
    """The runner names the features before it maps any code of the file, also beside another processor's /proc/cpuinfo. `load` refuses in the
    same words, and `torch.compile` refuses the target."""
    path, _ = _exported("mlp", level, folder=tmp_path)
    done = _emulated(processor, "-strace", installed / "bin/hybrid-run", path)
    names = '", "'.join(lacking)
    told = f'"library" needs "{names}": export the model for this processor, or run'
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr
    opened = done.stderr.partition(str(path))[2]
    assert "mmap(" in opened
    assert "PROT_EXEC" not in opened

    script = _USES.format(path=str(path))
    settings = {"HYBRID_TARGET": level, "HYBRID_CACHE_DIR": str(tmp_path / "cache")}
    done = _emulated(processor, sys.executable, "-c", script, **settings)
    assert done.returncode == 0, done.stderr
    file, target = done.stdout.splitlines()
    assert told in file
    assert f"is {level!r}, and this process cannot run its kernels: it lacks {', '.join(lacking)}; use" in target
