"""The kernel compiler module (`codegen/compiler.py`): a kernel to TIR, to an object file, to a shared library.

Nothing here imports TVM before `load`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir.linker import link
from torch_hybrid_backend.storage.sources import sources_version

# All that a kernel's text and its machine code are made by; engines import nothing else but utilities.
SOURCES: tuple[str, ...] = ("core", "sizes", "loops", "codegen", "engines/cpu", "graph/quantized.py")
SUFFIX = ".so"
ENVIRONMENT: Mapping[str, str] = {"TVM_NUM_THREADS": "1"}


@functools.cache
def version() -> str:
    """The installed TVM's version, asked of the installation: importing TVM takes a second. "" where it is not installed."""
    try:
        return importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def load() -> None:
    """Import TVM without torch: tvm_ffi imports it where present, for conversions that a compiler never makes.

    That would take two more seconds and twice the memory, and may start a C++ build of tvm_ffi's extension for torch.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm  # noqa: F401
        from tvm import tirx  # noqa: F401
    finally:
        if hide:
            del sys.modules["torch"]
    import torch_hybrid_backend.engines.cpu.tir.emit  # noqa: F401


def compile_kernel(job: Job) -> None:
    """Emit, compile and link one kernel: a library with the entry point `__tvm_ffi_<symbol>`. Raises CompileError, or whatever TVM raises.

    A kernel for a foreign target is compiled twice: for the target, as an object file that the library carries, and for this machine, so that
    the same loops are run and checked here.
    """
    from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
    from torch_hybrid_backend.engines.cpu.tir.pipeline import build

    assert isinstance(job.target, Target)
    function = emit_kernel(job.kernel, job.symbol, job.target)
    built = build(job.symbol, function, _tvm_target(job.target))
    output = Path(job.output)
    if job.assembly:
        output.with_suffix(".s").write_text(built.inspect_source("asm"))
    object_file = output.with_suffix(".o")
    runs_here = output.with_suffix(".here.o") if job.target.is_foreign else object_file
    try:
        built.write_to_file(str(object_file), "o")
        if job.target.is_foreign:
            function = emit_kernel(job.kernel, job.symbol, job.target, emulates=True)
            build(job.symbol, function, _tvm_target(job.target.here)).write_to_file(str(runs_here), "o")
        link(runs_here, output, carried=object_file)
    finally:
        object_file.unlink(missing_ok=True)
        runs_here.unlink(missing_ok=True)


@functools.cache
def _tvm_target(target: Target) -> Any:
    return tvm_target(target)


sources_version(*SOURCES)  # now: see there
