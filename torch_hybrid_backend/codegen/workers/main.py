"""The kernel compiler process: jobs in on standard input, libraries out on disk, answers on standard output.

A process of its own, because a kernel can crash LLVM, and because importing TVM costs a second and 200 MB that the user's process is
better off without. `compile_pool` starts it and is the only one to speak to it (`protocol`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import gc
import json
import os
import pickle
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from torch_hybrid_backend.codegen.kernel_key import SOURCES, compiler_version, engine_version
from torch_hybrid_backend.codegen.workers.protocol import IDLE_EXIT_STATUS, Job, Order, frame, split_frame
from torch_hybrid_backend.engines.tvm.target import Target, tvm_target
from torch_hybrid_backend.engines.tvm.tir.linker import link
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.sources import read_sources_version

_CHUNK_BYTES = 1 << 16


def main(idle_s: float, lifeline: int) -> None:
    """Serve jobs until standard input ends, or exit with IDLE_EXIT_STATUS when none came for `idle_s` seconds.

    `lifeline` is the end of a pipe that nobody writes to; the process ends at once when its other end is closed.
    """
    _end_with_parent(lifeline)
    faulthandler.enable()
    _forbid_core_dumps()
    # The two ends move out of the way: what TVM, LLVM or a linker print must not be taken for an answer.
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        _import_compiler()
        if read_sources_version(*SOURCES) != engine_version():
            raise CompileError("the package's source files changed while the kernel compiler was starting")
    except Exception as error:  # whatever an installation can get wrong: it is reported, not swallowed
        _answer(answers, {"ready": False, "error": _described(error)})
        return
    _answer(answers, {"ready": True, "version": compiler_version()})
    received = bytearray()
    while True:
        payload = split_frame(received)
        if payload is None:
            if not select.select([orders], [], [], idle_s)[0]:
                sys.exit(IDLE_EXIT_STATUS)
            chunk = os.read(orders, _CHUNK_BYTES)
            if not chunk:
                return
            received += chunk
            continue
        _answer(answers, {"error": _serve(payload)})


def compile_kernel(job: Job) -> None:
    """Emit, compile and link one kernel. Raises CompileError, or whatever TVM raises."""
    from torch_hybrid_backend.engines.tvm.tir.emit import emit_kernel
    from torch_hybrid_backend.engines.tvm.tir.pipeline import build

    function = emit_kernel(job.kernel, job.symbol, job.target)
    built = build(job.symbol, function, _tvm_target(job.target))
    output = Path(job.output)
    if job.assembly:
        output.with_suffix(".s").write_text(built.inspect_source("asm"))
    object_file = output.with_suffix(".o")
    built.write_to_file(str(object_file), "o")
    try:
        link(object_file, output)
    finally:
        object_file.unlink(missing_ok=True)


def _serve(payload: bytes) -> dict[str, str] | None:
    try:
        order: Order = pickle.loads(payload)
        with _time_limit(order.limit_s):
            compile_kernel(order.job)
    except Exception as error:  # the job's failure is the answer to it
        return _described(error)
    return None


@functools.cache
def _tvm_target(target: Target) -> Any:
    return tvm_target(target)


def _import_compiler() -> None:
    """Import TVM without torch: tvm_ffi imports it where present, for conversions that a compiler never makes.

    That would take two more seconds and twice the memory, and may start a C++ build of tvm_ffi's extension for torch.
    """
    # Collections were a quarter of the time that importing, and emitting a kernel, takes, and found next to nothing.
    gc.set_threshold(100_000)
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm  # noqa: F401
        from tvm import tirx  # noqa: F401
    finally:
        if hide:
            del sys.modules["torch"]
    import torch_hybrid_backend.engines.tvm.tir.emit  # noqa: F401

    gc.freeze()  # what was imported stays


def _end_with_parent(lifeline: int) -> None:
    """Have SIGIO, whose default action ends the process even while it is in C++, tell that the parent has ended.

    The pipe of the orders would not do: its SIGIO for an order may arrive after the order was read.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # A linker at work ends too: the pool starts each compiler process as the head of a group.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before the signal was armed
        sys.exit()


@contextlib.contextmanager
def _time_limit(seconds: float) -> Any:
    """The kernel's default action on SIGALRM ends this process, even while it hangs in C++."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _forbid_core_dumps() -> None:
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _described(error: BaseException) -> dict[str, str]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _answer(descriptor: int, message: dict[str, object]) -> None:
    data = frame(json.dumps(message).encode())
    while data:
        data = data[os.write(descriptor, data) :]
