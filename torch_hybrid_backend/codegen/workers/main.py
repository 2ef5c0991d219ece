"""The kernel compiler process: jobs in on standard input, artifacts out on disk, answers on standard output.

A process of its own, because a kernel can crash its compiler, and because importing one costs a second and 200 MB that the user's process
is better off without. `pool` starts it and is the only one to speak to it (`protocol`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import traceback
from typing import Any

from torch_hybrid_backend.codegen.compiler import KernelCompilerModule, compiler_version
from torch_hybrid_backend.codegen.workers.protocol import IDLE_EXIT_STATUS, Order, frame, split_frame
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.sources import read_sources_version, sources_version

_CHUNK_BYTES = 1 << 16


def main(compiler_name: str, idle_s: float, lifeline: int) -> None:
    """Serve jobs with a compiler module until standard input ends, or exit with IDLE_EXIT_STATUS when none came for `idle_s` seconds.

    `lifeline` is the end of a pipe that nobody writes to; the process ends at once when its other end is closed.
    """
    _end_with_parent(lifeline)
    faulthandler.enable()
    _forbid_core_dumps()
    # The two ends move out of the way: what a compiler or a linker prints must not be taken for an answer.
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        # Collections were a quarter of the time that importing, and emitting a kernel, takes, and found next to nothing.
        gc.set_threshold(100_000)
        compiler: KernelCompilerModule = importlib.import_module(compiler_name)
        sources = sources_version(*compiler.SOURCES)
        compiler.load()
        gc.freeze()  # what was imported stays
        if read_sources_version(*compiler.SOURCES) != sources:
            raise CompileError("the package's source files changed while the kernel compiler was starting")
    except Exception as error:  # whatever an installation can get wrong: it is reported, not swallowed
        _answer(answers, {"ready": False, "error": _described(error)})
        return
    _answer(answers, {"ready": True, "version": compiler_version(compiler)})
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
        _answer(answers, {"error": _serve(compiler, payload)})


def _serve(compiler: KernelCompilerModule, payload: bytes) -> dict[str, str] | None:
    try:
        order: Order = pickle.loads(payload)
        with _time_limit(order.limit_s):
            compiler.compile_kernel(order.job)
    except Exception as error:  # the job's failure is the answer to it
        return _described(error)
    return None


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
