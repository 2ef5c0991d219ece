"""Messages between the process that needs kernels and its compiler processes.

In frames (`processes/frames.py`). To the worker: a pickled `Order`. Back: JSON, so that nothing a crashing
compiler writes is ever unpickled:

    {"ready": true, "version": ...}                             once, when the compiler is loaded; `compiler_version`
    {"ready": false, "error": {...}}                            instead, where that failed
    {"error": null} or {"error": {"type": ..., "message": ..., "traceback": ...}}      for each job
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.codegen.compiler import CodeTarget
from torch_hybrid_backend.loops.kernels import Kernel

# A worker that nobody gave work for a while leaves with this status: whoever was about to use it takes another.
IDLE_EXIT_STATUS = 73


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Compile `kernel` to the file `output`, where it is called `symbol`.

    `key` is equal for jobs that make the same artifact. With `assembly`, the text of its machine code, where the compiler
    has one, is written beside it with the suffix ".s".
    """

    key: str
    symbol: str
    kernel: Kernel
    target: CodeTarget
    output: str
    assembly: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A job as it is sent: the worker ends itself after `limit_s` seconds, in case nobody is left to end it."""

    job: Job
    limit_s: float
