"""The kernel compiler process: jobs in on standard input, artifacts out on disk, answers on standard output.

A process of its own, because a kernel can crash its compiler, and because importing a compiler costs a second and 200 MB, which the user's
process is spared. Only `pool` starts the process and speaks to it (`protocol`).
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import sys

from torch_hybrid_backend.codegen.compiler import KernelCompilerModule, compiler_version
from torch_hybrid_backend.codegen.workers.protocol import IDLE_EXIT_STATUS, Order
from torch_hybrid_backend.errors import CompileError, failures
from torch_hybrid_backend.processes.frames import split_frame
from torch_hybrid_backend.processes.inside import answer, begin, described, time_limit
from torch_hybrid_backend.storage.sources import read_sources_version, sources_version

_CHUNK_BYTES = 1 << 16


def main(lifeline: int, compiler_name: str, idle_s: str) -> None:
    """Serve jobs with a compiler module until standard input ends; exit with IDLE_EXIT_STATUS after `idle_s` seconds without a job.
    `lifeline`: see `inside.begin`."""
    orders, answers = begin(lifeline)
    try:
        # Collections were a quarter of the time that importing, and emitting a kernel, takes, and found next to nothing.
        gc.set_threshold(100_000)
        compiler: KernelCompilerModule = importlib.import_module(compiler_name)
        sources = sources_version(*compiler.SOURCES)
        compiler.load()
        gc.freeze()  # what was imported stays
        if read_sources_version(*compiler.SOURCES) != sources:
            raise CompileError("the package's source files changed while the kernel compiler was starting")
    except failures(Exception) as error:  # whatever an installation can get wrong: it is reported, not swallowed
        answer(answers, {"ready": False, "error": described(error)})
        return
    answer(answers, {"ready": True, "version": compiler_version(compiler)})
    received = bytearray()
    while True:
        payload = split_frame(received)
        if payload is None:
            if not select.select([orders], [], [], float(idle_s))[0]:
                sys.exit(IDLE_EXIT_STATUS)
            chunk = os.read(orders, _CHUNK_BYTES)
            if not chunk:
                return
            received += chunk
            continue
        answer(answers, {"error": _serve(compiler, payload)})


def _serve(compiler: KernelCompilerModule, payload: bytes) -> dict[str, object] | None:
    try:
        order: Order = pickle.loads(payload)
        with time_limit(order.limit_s):
            compiler.compile_kernel(order.job)
    except failures(Exception) as error:  # the job's failure is the answer to it
        return described(error)
    return None
