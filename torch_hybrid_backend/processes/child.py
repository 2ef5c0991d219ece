"""Child processes: start, pipes, end, and error output.

    child = Child("package.module", ["one", "two"], what="the builder")     # runs package.module.main(lifeline, "one", "two")
    child.outgoing += frame(b"..."); child.write()
    for answer in child.read() or (): ...
    child.end()

Children are started by `subprocess`, as multiprocessing would import the user's script again. A child's `main` begins with `inside.begin`.
Unix only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.errors import CompileError, ScheduleError, failures, ignored, tells_of_shortage
from torch_hybrid_backend.processes.frames import split_frame
from torch_hybrid_backend.processes.interpreter import NO_INTERPRETER, interpreter

_CHUNK_BYTES = 1 << 16
_TAIL_CHARACTERS = 2000
# Signals that a process causes by its own fault. Others come from outside: SIGKILL from a user or from the system when memory is short, SIGSYS
# from a filter of system calls, SIGBUS from a full or failed disk under a mapped file.
_OWN_FAULTS = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
# Under such a limit a process may crash anywhere, as not all libraries check for failed allocations.
_MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_NICE = 10  # about a tenth of the time of a call's thread on a core that both use (sched(7))
# Imports this package from its own folder, but nothing else from there before the standard library. The parent's further folders come last.
_BOOTSTRAP = """
import sys
root, module, lifeline, count, *more = sys.argv[1:]
sys.path.insert(0, root)
import torch_hybrid_backend
del sys.path[0]
arguments, folders = more[:int(count)], more[int(count):]
sys.path.extend(folder for folder in folders if folder not in sys.path)
import importlib
importlib.import_module(module).main(int(lifeline), *arguments)
"""


@contextlib.contextmanager
def _standard_descriptors_taken() -> Iterator[None]:
    """Keep pipes from getting descriptors 0 to 2, if the program has closed these: output of libraries would go into the pipes."""
    with contextlib.ExitStack() as taken:
        while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
            taken.callback(os.close, descriptor)
        os.close(descriptor)
        yield


@dataclass(frozen=True, slots=True)
class End:
    """End of a child. `status`: its exit status, negative for a signal. `words`: the end of its error output."""

    status: int
    words: str

    @property
    def how(self) -> str:
        """Text that continues a sentence after the child's name, such as "was killed by SIGSEGV"."""
        return (
            f"was killed by {signal.Signals(-self.status).name}"
            if self.status < 0
            else f"ended with status {self.status}"
        )

    @property
    def said(self) -> str:
        """The error output, to append to a message; "" without output."""
        return f"\nIts last words:\n{self.words}" if self.words else ""

    @property
    def recurs(self) -> bool:
        """True if the child would end like this again: not from outside, not for lack of memory or disk, and not under a memory limit."""
        if not (self.status > 0 or -self.status in _OWN_FAULTS):
            return False
        is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _MEMORY_LIMITS)
        return not is_limited and not tells_of_shortage(self.words)


class Child:
    """Owner of a child process, its pipes and the file of its error output."""

    def __init__(
        self, module: str, arguments: Sequence[str], what: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the child. module: its `main(lifeline, *arguments)` runs in the child. what: the name of the child in messages, "the kernel
        compiler". environment: variables besides the parent's. Raises CompileError if the child cannot be started."""
        self.outgoing = bytearray()
        self._received = bytearray()
        root = str(Path(__file__).parents[2])
        # The child inherits the environment, with one thread for libraries. Compilers ask for HOME when they are imported, and write nothing
        # there; without one, HOME is a folder that cannot exist.
        variables = {
            "HOME": "/nonexistent",
            **os.environ,
            "LC_ALL": "C.UTF-8",  # English messages, which `tells_of_shortage` reads
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **(environment or {}),
        }
        try:
            python = interpreter()
            if python is None:
                raise CompileError(f"{what} cannot be started: {NO_INTERPRETER}", recurs=False)
            command = [python, "-P", "-c", _BOOTSTRAP, root, module]
            with (
                _standard_descriptors_taken(),
                contextlib.ExitStack() as close_after_start,
                contextlib.ExitStack() as opened,
            ):
                self._errors = opened.enter_context(tempfile.TemporaryFile())
                lifeline, other_end = os.pipe()
                self._lifeline = opened.enter_context(open(other_end, "wb", buffering=0))
                close_after_start.callback(os.close, lifeline)
                self.process = subprocess.Popen(
                    [*command, str(lifeline), str(len(arguments)), *arguments, *filter(None, sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=variables,
                    pass_fds=[lifeline],
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
                opened.pop_all()  # from here on, `end` closes the files
        except failures(OSError) as error:
            raise CompileError(f"{what} cannot be started: {error}", recurs=False) from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    @property
    def alive(self) -> bool:
        """True if the child runs. A child that ended is not reaped: its process group stays its own, and `end` can kill the rest of the
        group."""
        if self.process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        except ChildProcessError:  # a program that ignores SIGCHLD
            return False
        except AttributeError:  # not on macOS
            return self.process.poll() is None

    def write(self) -> None:
        """Send as much of `outgoing` as the pipe takes."""
        try:
            del self.outgoing[: os.write(self.stdin, self.outgoing)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outgoing.clear()  # the child ended: `read` returns None

    def close_orders(self) -> None:
        """Close the child's input: the child reads the end of the file, and gets no more orders."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def read(self) -> list[dict[str, object]] | None:
        """The answers that have arrived since the last call; None if the child has closed its output."""
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

    def processor_s(self) -> float:
        """Processor time in seconds of the child, and of its own children that it waited for. Only differences have a meaning: if the system
        does not report processor time, this is a clock."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:15]  # proc_pid_stat(5): utime, stime, cutime, cstime
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        except failures(OSError, ValueError):
            return time.monotonic()

    def lower_priority(self) -> None:
        """Lower the child's priority below that of this process, which runs calls meanwhile. Only root can raise it again."""
        with ignored(OSError):  # the child may have ended
            os.setpriority(os.PRIO_PROCESS, self.process.pid, _NICE)

    def wait(self, seconds: float) -> None:
        """Wait for the child's end, for at most this many seconds."""
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            time.sleep(0.005)

    def end(self) -> int:
        """Kill the child's process group. Returns the child's exit status, negative for a signal."""
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
        """The end of the child's error output."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_TAIL_CHARACTERS:].strip()


def as_exception(what: str, fields: object) -> CompileError:
    """The exception that a child described by `inside.described`, with the child's traceback as a note. `what` begins the message."""
    fields = fields if isinstance(fields, dict) else {}
    kind, message = str(fields.get("type", "")), str(fields.get("message", ""))
    recurs = bool(fields.get("recurs", True))
    if kind == "ScheduleError":
        error: CompileError = ScheduleError(f"{what}: {message}")
    elif kind == "CompileError":
        error = CompileError(f"{what}: {message}", recurs=recurs)
    else:
        error = CompileError(f"{what}: {kind}: {message}", recurs=recurs)
    error.add_note(str(fields.get("traceback", "")))
    return error
