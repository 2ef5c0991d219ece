"""`make wheel`: what it makes can be installed and runs where there is no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import torch_hybrid_backend

ROOT = Path(__file__).parents[2]
_WHEELS = sorted((ROOT / "dist").glob("*.whl"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not _WHEELS, reason="no wheel in dist/: run `make wheel`, as `make test-full` does"),
]

_PROGRAM = """
import torch, torch_hybrid_backend
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)).eval()
x = torch.randn(2, 3, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="hybrid")(x), model(x), rtol=1e-4, atol=1e-5)
    (plan,) = torch_hybrid_backend.explain(model, x).plans
print(torch_hybrid_backend.__file__)
print({node.engine for node in plan.nodes})
try:
    torch.ops.torch_hybrid_backend.plan_new(0, 0)
except RuntimeError as error:
    print("raised:", error)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    return _WHEELS[-1]


def test_it_is_of_these_sources(wheel: Path) -> None:
    """Every module of the package as it is now, the C++ runtime and the licence; no tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for path in sorted((ROOT / "torch_hybrid_backend").rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            assert archive.read(name) == path.read_bytes(), f"{name} is another: run `make wheel`"
    assert "torch_hybrid_backend/_runtime.so" in names
    assert "torch_hybrid_backend/py.typed" in names
    for name in (
        "libhybrid_runner.so",
        "libhybrid_runner_torch.so",
        "hybrid-run",
        "hybrid_runner.h",
        "hybrid_runner.hpp",
    ):
        assert f"torch_hybrid_backend/runner/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"torch_hybrid_backend"}


def test_its_metadata_is_complete(wheel: Path) -> None:
    """Metadata that a registry shows, and that installers ask for, are there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Version"] == torch_hybrid_backend.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Summary"]
    assert "torch.compile" in metadata["Keywords"]
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])
    assert any(requirement.startswith("torch") for requirement in metadata.get_all("Requires-Dist", []))
    assert metadata.get_payload()


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize(
    "name", ["_runtime.so", "runner/libhybrid_runner.so", "runner/libhybrid_runner_torch.so", "runner/hybrid-run"]
)
def test_its_tag_is_true(wheel: Path, tmp_path: Path, name: str) -> None:
    """The wheel needs no glibc later than 2.28, no C++ runtime library and no library of Python's, and is stripped."""
    assert wheel.name == f"torch_hybrid_backend-{torch_hybrid_backend.__version__}-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(f"torch_hybrid_backend/{name}", tmp_path)
    shown = subprocess.run(["objdump", "-p", "-h", library], capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", shown)]
    assert versions
    assert max(versions) <= (2, 28)
    needed = set(re.findall(r"NEEDED\s+(\S+)", shown))
    assert ("libtorch_cpu.so" in needed) == (name in ("_runtime.so", "runner/libhybrid_runner_torch.so"))
    assert not {name for name in needed if "stdc++" in name or "python" in name}
    assert ".debug_info" not in shown


def test_a_model_runs_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    """In a new environment beside the installed torch, with a linker alone on the PATH: TVM takes the model, errors of the runtime reach
    Python, and the command is there."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ld").symlink_to(str(shutil.which("ld")))
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "HYBRID_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {name: value for name, value in os.environ.items() if name in ("LANG", "TMPDIR")}
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    for command in ([sys.executable, "-m", "venv", tmp_path / "venv"], install):
        subprocess.run(command, env=environment, check=True)
    (folder,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    # Behind the environment's own packages: torch and its like, and not this repository's package.
    (folder / "beside.pth").write_text(sysconfig.get_path("platlib") + "\n")
    done = subprocess.run(
        [python, "-c", _PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, engines, raised = done.stdout.splitlines()
    assert Path(where).is_relative_to(folder)
    assert engines == "{'tvm'}"
    assert raised.startswith("raised: ")
    version = subprocess.run(
        [folder.parents[2] / "bin" / "hybrid", "--version"], env=environment, capture_output=True, text=True, check=True
    )
    assert version.stdout == f"hybrid {torch_hybrid_backend.__version__}\n"
