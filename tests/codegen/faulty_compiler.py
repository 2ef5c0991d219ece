"""A kernel compiler module that is the interpreter's, but for what a file tells it to do: fail, hang, never end, die, find the disk full.

The environment variable FAULTY_COMPILER names a folder: `fault` in it tells, `asked` gets a line for each kernel that was tried.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tests.interpreter import compiler as interpreter
from torch_hybrid_backend.codegen.workers.protocol import Job

SOURCES: tuple[str, ...] = interpreter.SOURCES
SUFFIX = interpreter.SUFFIX
ENVIRONMENT: Mapping[str, str] = {}
version = interpreter.version
load = interpreter.load


def compile_kernel(job: Job) -> None:
    """Compile as told."""
    folder = Path(os.environ["FAULTY_COMPILER"])
    with (folder / "asked").open("a") as asked:
        asked.write(f"{job.symbol}\n")
    match (folder / "fault").read_text():
        case "fails":
            raise ValueError("no registers are left")
        case "hangs":
            time.sleep(600)
        case "is slow":
            while True:
                pass
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "has no disk":
            raise OSError(28, "No space left on device")
    interpreter.compile_kernel(job)
