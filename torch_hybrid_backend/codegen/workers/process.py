"""One kernel compiler process, as seen from the process that needs kernels: its pipes, its end and its last words.

`pool` decides who uses it for what; `main` is what runs inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch_hybrid_backend
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.workers.protocol import Job, split_frame
from torch_hybrid_backend.errors import CompileError

_CHUNK_BYTES = 1 << 16
_TAIL_CHARACTERS = 2000
# Imports this very package, wherever it lies, without putting its folder before the standard library for everything else; what the parent's
# path has beyond an interpreter's usual one comes last.
_BOOTSTRAP = """
import sys
root, compiler, idle_s, lifeline, *more = sys.argv[1:]
sys.path.insert(0, root)
import torch_hybrid_backend
del sys.path[0]
sys.path.extend(folder for folder in more if folder not in sys.path)
from torch_hybrid_backend.codegen.workers.main import main
main(compiler, float(idle_s), int(lifeline))
"""


@contextlib.contextmanager
def _standard_descriptors_taken() -> Iterator[None]:
    """Where a program has closed descriptors 0 to 2, no pipe may become one of them: what libraries print would go into it."""
    with contextlib.ExitStack() as taken:
        while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
            taken.callback(os.close, descriptor)
        os.close(descriptor)
        yield


class CompilerProcess:
    """One compiler process. Owns the process, its pipes and the file its error output goes to."""

    def __init__(self, compiler: KernelCompilerModule, idle_s: float) -> None:
        self.ready = False
        self.job: Job | None = None
        self.outgoing = bytearray()
        self._received = bytearray()
        root = str(Path(torch_hybrid_backend.__file__).parents[1])
        # The child's environment is the parent's: it decides nothing here but how many threads libraries start.
        # HOME, where it has none, is a place that nobody can put anything: compilers ask for one as they are imported, and keep nothing.
        environment = {
            "HOME": "/nonexistent",
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **compiler.ENVIRONMENT,
        }
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, root, compiler.__name__, str(idle_s)]
        with (
            _standard_descriptors_taken(),
            contextlib.ExitStack() as close_after_start,
            contextlib.ExitStack() as opened,
        ):
            try:
                self._errors = opened.enter_context(tempfile.TemporaryFile())
                lifeline, other_end = os.pipe()
                self._lifeline = opened.enter_context(open(other_end, "wb", buffering=0))
                close_after_start.callback(os.close, lifeline)
                self.process = subprocess.Popen(
                    [*command, str(lifeline), *filter(None, sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=environment,
                    pass_fds=[lifeline],
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            except OSError as error:
                raise CompileError(f"the kernel compiler cannot be started ({sys.executable}): {error}") from error
            opened.pop_all()  # from here on `end` closes it
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    @property
    def alive(self) -> bool:
        """Asked without reaping: while it is a zombie its group is surely its own, and `end` can kill what is left of that."""
        if self.process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        except ChildProcessError:  # a program that ignores SIGCHLD
            return False
        except AttributeError:  # not on macOS
            return self.process.poll() is None

    def write(self) -> None:
        """Send what the pipe takes of `outgoing`."""
        try:
            del self.outgoing[: os.write(self.stdin, self.outgoing)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outgoing.clear()  # it died: `read` finds the end of its output

    def read(self) -> list[dict[str, object]] | None:
        """The answers that have arrived; None where there will be none any more."""
        try:
            chunk = os.read(self.stdout, _CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        self._received += chunk
        answers = []
        while (payload := split_frame(self._received)) is not None:
            answers.append(json.loads(payload))
        return answers

    def wait(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            time.sleep(0.005)

    def end(self) -> int:
        """Kill the process where it still runs, and its children; its exit status, negative for a signal."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._lifeline.close()
        self._errors.close()
        return status

    def last_words(self) -> str:
        """The end of its error output."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_TAIL_CHARACTERS:].strip()
