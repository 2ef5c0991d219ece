"""`make wheel TARGET=aarch64`: the wheel, and the backend on AArch64, as far as emulation shows."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import torch_hybrid_backend
from tests.packaging.arm64_for_tests import Arm64, lacking

ROOT = Path(__file__).parents[2]
_WHEELS = sorted((ROOT / "dist/aarch64").glob("*.whl"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        platform.machine() == "aarch64", reason="tests/packaging/test_wheel.py has the wheel of AArch64"
    ),
    pytest.mark.skipif(not _WHEELS, reason="no wheel in dist/aarch64/: run `make wheel TARGET=aarch64`"),
]

# Ten operators of different schedules in one graph, which saves nine times the minute that tracing takes here, and a network whose kernels are
# chosen by timing.
_PROGRAM = """
import json, platform, torch, torch_hybrid_backend
from torch import nn
from torch.nn import functional as F

class Operators(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.layer_norm, self.batch_norm = nn.Linear(48, 40), nn.LayerNorm(48), nn.BatchNorm2d(8)
        self.conv2d, self.depthwise = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x, image, heads):
        return {
            "linear": self.linear(x),
            "layer_norm": self.layer_norm(x),
            "gelu": F.gelu(x),
            "softmax": x.softmax(-1),
            "sum": x.sum(0),
            "conv2d": self.conv2d(image),
            "depthwise": self.depthwise(image),
            "batch_norm": self.batch_norm(image),
            "max_pool2d": F.max_pool2d(image, 2),
            "attention": F.scaled_dot_product_attention(heads, heads, heads),
        }

torch.manual_seed(0)
torch.set_num_threads(2)
image = torch.randn(2, 8, 14, 14)
operators = Operators().eval(), (torch.randn(6, 48), image, torch.randn(1, 2, 12, 16)), {"placement": "estimate", "prefer_kernels": True}
layers = [nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
network = nn.Sequential(*layers).eval(), (image,), {"placement": "measure"}
found = {"machine": platform.machine()}
for name, (model, inputs, options) in (("operators", operators), ("network", network)):
    options |= {"strict": True, "compile_deadline_s": 3600}
    with torch.no_grad():
        fast = torch.compile(model, backend="hybrid", options=options)
        for _ in range(2):
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
        (plan,) = torch_hybrid_backend.explain(model, *inputs, options=options).plans
    found[name] = [node.engine for node in plan.nodes]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    return _WHEELS[-1]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Arm64:
    """Debian with the wheel; skips where it cannot be made here."""
    if reason := lacking():
        pytest.skip(reason)
    files = tmp_path_factory.mktemp("arm64")
    made = Arm64(files)
    made.install(wheel)
    return made


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
@pytest.mark.parametrize(
    "name", ["_runtime.so", "runner/libhybrid_runner.so", "runner/libhybrid_runner_torch.so", "runner/hybrid-run"]
)
def test_its_tag_is_true(wheel: Path, tmp_path: Path, name: str) -> None:
    """Code for AArch64 that needs no glibc later than the tag's, no C++ runtime library and no library of Python's, and is stripped."""
    start = f"torch_hybrid_backend-{torch_hybrid_backend.__version__}-py3-none-manylinux_2_"
    glibc = (2, int(wheel.name.removeprefix(start).removesuffix("_aarch64.whl")))
    assert glibc <= (2, 28)
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(f"torch_hybrid_backend/{name}", tmp_path)
        (tag,) = (each for each in archive.namelist() if each.endswith(".dist-info/WHEEL"))
        assert f"Tag: py3-none-manylinux_2_{glibc[1]}_aarch64" in archive.read(tag).decode()
    shown = subprocess.run(["readelf", "-W", "-hdVS", library], capture_output=True, text=True, check=True).stdout
    assert re.search(r"Class:\s+ELF64", shown)
    assert re.search(r"Data:.*little endian", shown)
    assert re.search(r"Machine:\s+AArch64", shown)
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", shown)]
    assert versions
    assert max(versions) <= glibc
    needed = set(re.findall(r"NEEDED\).*\[(.*)\]", shown))
    assert ("libtorch_cpu.so" in needed) == (name in ("_runtime.so", "runner/libhybrid_runner_torch.so"))
    assert not {name for name in needed if "stdc++" in name or "python" in name}
    assert ".debug_info" not in shown


def test_it_has_the_modules_of_these_sources(wheel: Path) -> None:
    """Every module of the package as it is now, and nothing else beside the libraries."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted((ROOT / "torch_hybrid_backend").rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            assert archive.read(name) == path.read_bytes(), f"{name} is another: run `make wheel TARGET=aarch64`"


def test_doctor_finds_all(system: Arm64) -> None:
    """The system is supported, TVM and the linker are there, features are those of the emulated processor."""
    said = system.run("python3", "-m", "torch_hybrid_backend.cli", "doctor", timeout_s=1800)
    assert "Linux on aarch64, which is supported" in said
    assert re.search(r"tvm +can run", said)
    assert re.search(r"linker +/usr/bin/ld", said)


def test_operators_and_a_network(system: Arm64) -> None:
    """Results are eager's: of ten operators by kernels alone, of a network by whatever timing chose (`_PROGRAM` compares them)."""
    found = json.loads(system.run("python3", "-c", _PROGRAM, timeout_s=7000).splitlines()[-1])
    assert found["machine"] == "aarch64"
    assert len(found["operators"]) >= 10
    assert {*found["operators"]} == {"tvm"}
