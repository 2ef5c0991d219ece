"""The C++ side as a whole: its own unit tests, and what the built library asks of PyTorch."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_hybrid_backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and g++")
@pytest.mark.parametrize(
    "target",
    # Compiling all of the runtime takes a minute. Plans of most kinds of steps run in `make test` through the library that Python loads.
    ["quick", pytest.param("test", marks=pytest.mark.full)],
)
def test_the_cpp_unit_tests_pass(target: str) -> None:
    """csrc/tests pass under the address and undefined-behaviour sanitisers. What is compiled stays in build/tests for a later run."""
    out = ROOT / "build/tests" / f"csrc-torch-{torch.__version__}"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(target, out)


@pytest.mark.full
@pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("g++") and shutil.which("setarch")), reason="needs make, g++ and setarch"
)
def test_the_cpp_unit_tests_pass_under_the_thread_sanitiser(tmp_path: Path) -> None:
    """No data race between a team's threads, its leader and their scratch memory, nor between two teams at once."""
    if _compiles_with_tsan(tmp_path):
        _make("tsan", tmp_path)
    else:
        pytest.skip("the compiler has no thread sanitiser")


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and g++")
def test_changed_files_do_not_crash_the_reader(tmp_path: Path) -> None:
    """A minute of changed .hybrid files under the sanitisers, by libFuzzer where there is clang."""
    _make("fuzz", tmp_path)


def _make(target: str, out: Path) -> None:
    command = [
        "make",
        f"-j{os.cpu_count() or 1}",
        "-C",
        str(ROOT / "csrc"),
        target,
        f"OUT={out}",
        f"PYTHON={sys.executable}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _compiles_with_tsan(folder: Path) -> bool:
    (folder / "empty.cc").write_text("int main() {}\n")
    command = ["g++", "-fsanitize=thread", str(folder / "empty.cc"), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_kernels_are_called_as_tvm_lays_it_down() -> None:
    """The structs and numbers of csrc/include/kernel_abi.h are those of the installed tvm_ffi's headers: a change there is noticed here."""
    libinfo = pytest.importorskip("tvm_ffi.libinfo")
    headers = {libinfo.find_include_path(), libinfo.find_dlpack_include_path()}
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Iinclude", *(f"-I{path}" for path in headers)]
    result = subprocess.run(
        [*command, "tests/same_abi_as_tvm.cc"], cwd=ROOT / "csrc", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


_BUILD_WITHOUT_TVM = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv[1:] = ["-q", "build_ext", "--build-temp", "temp", "--build-lib", "lib"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_library_is_built_from_pytorchs_headers_alone(tmp_path: Path) -> None:
    """`pip install --no-build-isolation .` beside an installed torch needs nothing else: TVM's packages cannot be imported here."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "tools", "torch_hybrid_backend"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "build.py").write_text(_BUILD_WITHOUT_TVM)
    result = subprocess.run([sys.executable, "build.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    load = f"import torch; torch.ops.load_library({str(tmp_path / 'lib/torch_hybrid_backend/_runtime.so')!r})"
    subprocess.run([sys.executable, "-c", f"{load}; torch.ops.torch_hybrid_backend.watches_writes()"], check=True)


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
