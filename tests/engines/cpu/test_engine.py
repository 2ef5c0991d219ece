"""The TVM engine as the registry makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.services_for_tests import services
from torch_hybrid_backend.codegen.compiler import compiler_version
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Supported
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.cpu.tir import compiler

ROOT = Path(__file__).parents[3]


def test_it_compiles_for_this_processor() -> None:
    """Its timings are those of the compiler with its sources, and of the processor."""
    engine = TvmEngine(Config(compile_threads=1), services())
    assert (engine.name, engine.devices, engine.keeps_deadline) == ("tvm", {"cpu"}, True)
    assert engine.available() == Supported()
    assert engine.version(CPU) == f"{compiler_version(compiler)} {TvmBackend().target.fingerprint} budget None"
    assert [name for name, _ in engine.describe()] == ["tvm", "target", "linker"]


def test_importing_it_does_not_import_tvm() -> None:
    """A process that finds every kernel in the cache never pays for that."""
    code = """
import sys
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
TvmBackend().describe()
assert not {"tvm", "tvm_ffi"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
