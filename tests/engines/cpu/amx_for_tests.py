"""AMX on any processor: kernels run with its instructions emulated (csrc/tests/amx_emulation.cc), or are compiled for one that has it."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tvm import tirx

from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import x86
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr

SAPPHIRE_RAPIDS = Target(
    "sapphirerapids", "x", ("amx_bf16", "amx_int8", "amx_tile", "avx512f"), 16, 2, 48 << 10, 2 << 20
)
# float32 that no three bfloat16 are, or not exactly: infinite, no number, close to the ends of the range, denormal, beyond the limits.
ODD_NUMBERS = [math.inf, -math.inf, math.nan, 3.4e38, 3e-39, 1e-45, 2 * LARGEST, SMALLEST / 2, -3e38]
_SOURCE = Path(__file__).parents[3] / "csrc/tests/amx_emulation.cc"


@functools.cache
def emulation() -> ctypes.CDLL:
    """The emulation, compiled and opened so that kernels find it by its functions' names. Skips the test where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of AMX needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "amx_emulation.so")
        # This machine's fused multiply-add is the emulated one, and vectors of it are 20 times as fast as C's function.
        fast = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
        flags = ["-std=c++20", *fast, "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _emulated(name: str, *operands: TirExpr) -> Stmt:
    """In place of `x86.amx`: a call of the emulation. C's promotions make ints of the numbers of tiles."""
    as_c = [
        tirx.IntImm("int32", int(x.value)) if isinstance(x, tirx.IntImm) and str(x.ty) == "int8" else x
        for x in operands
    ]
    return tirx.Evaluate(tirx.call_extern("void", f"emulated_{name}", *as_c))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Kernels that the test compiles in this process run on emulated tiles, which they have all released by its end."""
    library = emulation()
    monkeypatch.setattr(x86, "amx", _emulated)
    yield library
    assert library.configured_threads_now() == 0
