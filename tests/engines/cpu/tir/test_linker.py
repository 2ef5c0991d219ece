from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cpu.kernels_for_tests import every_kind
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.engines.cpu.tir import linker
from torch_hybrid_backend.errors import CompileError

ROOT = Path(__file__).parents[4]
# What the C library, and its mathematics, provide to kernels.
PROVIDED = {"memcpy", "memmove", "memset"}

needs_nm = pytest.mark.skipif(not shutil.which("nm") or sys.platform != "linux", reason="needs GNU nm")


def undefined(library: Path) -> set[str]:
    """The symbols that the process must provide, without versions; those that may be missing (weak ones) are left out."""
    command = ["nm", "-D", "--undefined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split() for line in lines]
    return {name.split("@")[0] for kind, name in symbols if kind == "U"}


def test_a_linker_that_fails_is_quoted(tmp_path: Path) -> None:
    """The message quotes every linker that was given a file that is no object."""
    (tmp_path / "bad.o").write_bytes(b"not an object file")
    with pytest.raises(CompileError, match=r"cannot be linked[\s\S]*bad\.o"):
        linker.link(tmp_path / "bad.o", tmp_path / "bad.so")


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler")
@pytest.mark.parametrize("with_ld", [True, False], ids=["ld", "driver alone"])
def test_symbols_that_nobody_provides_are_an_error(
    with_ld: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that would fail when it is loaded is not made, and what it lacks is named; what the compiler's own library has is no lack."""
    real = shutil.which
    monkeypatch.setattr(linker.shutil, "which", lambda name: real(name) if name != "ld" or with_ld else None)

    def linked(source: str) -> None:
        (tmp_path / "x.c").write_text(source)
        subprocess.run(["cc", "-c", "-fPIC", "-o", tmp_path / "x.o", tmp_path / "x.c"], check=True)
        linker.link(tmp_path / "x.o", tmp_path / "x.so")

    linked("__int128 divide(__int128 a, __int128 b) { return a / b; }")
    linked("double sine(double); double sin(double x); double sine(double x) { return sin(x); }")
    with pytest.raises(CompileError, match="TVMFFIErrorSetRaisedFromCStrParts"):
        linked("void TVMFFIErrorSetRaisedFromCStrParts(void); void fail(void) { TVMFFIErrorSetRaisedFromCStrParts(); }")


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a C compiler")
@pytest.mark.parametrize("called", ["memcpy", "memmove", "memset", "exp"])
def test_the_c_library_is_found_by_ld_alone(called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may call functions of the C library and its mathematics without a compiler on the PATH: LLVM calls memcpy on AArch64."""
    (tmp_path / "x.s").write_text(f".globl kernel\nkernel: .quad {called}\n.section .note.GNU-stack\n")
    subprocess.run(["cc", "-c", "-o", tmp_path / "x.o", tmp_path / "x.s"], check=True)
    real = shutil.which
    monkeypatch.setattr(linker.shutil, "which", lambda name: real(name) if name == "ld" else None)
    linker.link(tmp_path / "x.o", tmp_path / "x.so")
    ctypes.CDLL(str(tmp_path / "x.so"))


@needs_nm
@pytest.mark.parametrize("capability", ["", "AVX2"], ids=["host", "avx2"])
def test_kernels_of_every_kind_need_nothing(capability: str, tmp_path: Path) -> None:
    """A kernel library has no undefined symbol but the C library's: nothing of TVM's is there when it runs."""
    pytest.importorskip("tvm")
    target = Target.host().within(capability)
    kinds = every_kind()
    jobs = [Job(name, f"kernel_{name}", kernel, target, str(tmp_path / f"{name}.so")) for name, kernel in kinds.items()]
    compiler = KernelCompiler(tir_compiler, threads=1)
    made = compiler.compile(jobs, 120)
    compiler.close()
    for library in made:
        assert isinstance(library, Path), library
        assert undefined(library) <= PROVIDED


_TRAINING = """
import torch
from benchmarks.networks import SmallCnn, SmallTransformer
for make, x in ((SmallCnn, torch.randn(16, 3, 16, 16)), (SmallTransformer, torch.randint(0, 100, (16, 12)))):
    for dynamic in (False, True):
        torch.compiler.reset()
        logits = torch.compile(make().train(), backend="hybrid", dynamic=dynamic)(x)
        torch.nn.functional.cross_entropy(logits, torch.randint(0, 10, (16,))).backward()
"""


@needs_nm
@pytest.mark.full
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_of_training_need_nothing(capability: str, tmp_path: Path) -> None:
    """So for all kernels of two networks, forward and backward, of fixed sizes and of any, also where PyTorch is held to AVX2."""
    pytest.importorskip("tvm")
    settings = {"HYBRID_CACHE_DIR": str(tmp_path), "HYBRID_PLACEMENT": "estimate", "ATEN_CPU_CAPABILITY": capability}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _TRAINING], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    libraries = list(tmp_path.rglob("*.so"))
    assert len(libraries) > 40
    assert set().union(*map(undefined, libraries)) <= PROVIDED


def test_without_a_linker_the_text_is_the_documented_one() -> None:
    """The documentation quotes the warning, and says what to do."""
    shown, _, _ = linker.NO_LINKER.partition(" (")
    assert f"| `{shown} (" in (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
