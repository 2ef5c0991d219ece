"""Files for processors of another architecture than this machine's: what is in them is made, and checked against eager, here."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.cli import main
from torch_hybrid_backend.engines.cpu.tir import linker
from torch_hybrid_backend.errors import ArtifactError, ConfigError, HybridError
from torch_hybrid_backend.runtime.native.ops import Artifact

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="there, kernels for AArch64 are no foreign ones")
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the package ziglang")

_MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10), nn.Softmax(-1)]
    return nn.Sequential(*layers).eval(), (torch.randn(2, 3, 8, 8),)
"""
# Of ELF: 64 bits, little-endian; and the number of AArch64.
_ELF, _AARCH64 = b"\x7fELF\x02\x01", 183


@needs_zig
@pytest.mark.fault(
    "a `.hybrid` file is for another architecture",
    "ArtifactError that names both processors; nothing of the file has run; `hybrid inspect` shows it",
)
def test_a_file_for_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds AArch64's machine code, says whose, and is refused here before any of it is mapped; `inspect` reads it."""
    (tmp_path / "model.py").write_text(_MODEL)
    path = tmp_path / "model.hybrid"
    command = [
        sys.executable,
        "-c",
        "import sys; from torch_hybrid_backend.cli import main; sys.exit(main())",
        "export",
    ]
    told = subprocess.run(
        [*command, f"{tmp_path}/model.py:make", "-o", path, "--target", "neoverse-n1"],
        env={**os.environ, "HYBRID_CACHE_DIR": str(tmp_path / "cache"), "HYBRID_STRICT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert "for aarch64 asimd asimddp asimdhp: engines and kernels were chosen by estimates" in told.stdout
    assert "differ from eager's by at most" in told.stdout, told.stdout
    artifact = Artifact(path, runs=False)
    (target,) = json.loads(artifact.manifest)["targets"]
    assert target == {
        "system": "linux",
        "processor": "aarch64",
        "features": ["asimd", "asimddp", "asimdhp"],
        "library": "library",
    }
    segment = next(each for each in json.loads(artifact.manifest)["segments"] if each["name"] == "library")
    begin = path.read_bytes()[segment["offset"] : segment["offset"] + 20]
    assert begin.startswith(_ELF)
    assert struct.unpack_from("<H", begin, 18) == (_AARCH64,)
    with pytest.raises(ArtifactError, match=r'\(linux on x86_64\); "library" is for "linux" on "aarch64"'):
        torch_hybrid_backend.load(path)
    out = io.StringIO()
    assert main(["inspect", str(path)], out=out) == 0
    assert "for linux on aarch64 with asimd, asimddp, asimdhp" in out.getvalue()
    assert main(["run", str(path)], out=out) == 1
    assert "export the model for this processor" in capsys.readouterr().err


def test_what_links_for_arm_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a linker for the target an export says what to install: kernels are the only thing that would be missing."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "ziglang" else find(name, *args)
    )
    monkeypatch.setattr(linker.shutil, "which", lambda name: None if name.startswith("aarch64") else f"/usr/bin/{name}")
    options = {"target": "armv8-a", "strict": True}
    with pytest.raises(
        HybridError, match="no linker for aarch64 was found: `pip install ziglang`, or put aarch64-linux-gnu-gcc"
    ):
        torch_hybrid_backend.export(
            nn.Linear(8, 8).eval(), (torch.randn(2, 8),), tmp_path / "x.hybrid", options=options
        )


def test_kernels_for_arm_are_not_run_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile says that files are what such a target is for; where nothing is timed, the same loops run here."""
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    options = {"target": "neoverse-v1", "placement": "measure"}
    with torch.no_grad():
        with pytest.raises(ConfigError, match="cannot time its kernels: write a file for that processor"):
            torch.compile(model, backend="hybrid", options=options)(x)
        compiled = torch.compile(model, backend="hybrid", options={**options, "placement": "estimate"})
        torch.testing.assert_close(compiled(x), model(x))


def test_a_precision_that_the_target_has_no_instructions_for(caplog: pytest.LogCaptureFixture) -> None:
    """The target is asked, not this machine: with bfloat16 here, kernels of a level without it compute as written."""
    compiled = torch.compile(
        nn.Linear(8, 8).eval(), backend="hybrid", options={"target": "x86-64-v3", "precision": "bf16"}
    )
    with torch.no_grad():
        compiled(torch.randn(2, 8))
    assert "x86-64-v3 has no instructions for bf16" in caplog.text
