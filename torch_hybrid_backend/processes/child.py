"""A child process that works for this one: its pipes, its end and its last words.

    child = Child("package.module", ["one", "two"], what="the builder")     # runs package.module.main(lifeline, "one", "two")
    child.outgoing += frame(b"..."); child.write()
    for answer in child.read() or (): ...
    child.end()

Plain subprocesses: multiprocessing would import the user's script again. What runs inside begins with `inside.begin`. Unix only.
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
# Signals that a process brings upon itself. SIGKILL, say, comes from a user, or from a machine that is short of memory; SIGSYS from a filter of
# system calls; SIGBUS from a full disk or a failed one under a file that is mapped.
_OWN_FAULTS = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
# With less of these than everything a process may crash in any place: not all libraries look whether they were given memory.
_MEMORY_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_BESIDE_CALLS = (
    10  # a nice value: about a tenth of the time that a call's thread gets on a core that both want (sched(7))
)
# Imports this very package, wherever it lies, without putting its folder before the standard library for everything else; what the parent's
# path has beyond an interpreter's usual one comes last.
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
    """Keep descriptors 0 to 2, which a program may have closed, from becoming pipes: what libraries print would go into it."""
    with contextlib.ExitStack() as taken:
        while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
            taken.callback(os.close, descriptor)
        os.close(descriptor)
        yield


@dataclass(frozen=True, slots=True)
class End:
    """End of a child: its exit status, negative for a signal, and its last words."""

    status: int
    words: str

    @property
    def how(self) -> str:
        """Text for a sentence that begins with the child's name: how the child ended."""
        return (
            f"was killed by {signal.Signals(-self.status).name}"
            if self.status < 0
            else f"ended with status {self.status}"
        )

    @property
    def said(self) -> str:
        """End of a message about the child."""
        return f"\nIts last words:\n{self.words}" if self.words else ""

    @property
    def recurs(self) -> bool:
        """True if the child itself was at fault: neither the machine was short of something, nor did a limit of this process end it."""
        if not (self.status > 0 or -self.status in _OWN_FAULTS):
            return False
        is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _MEMORY_LIMITS)
        return not is_limited and not tells_of_shortage(self.words)


class Child:
    """A child process. Owns the process, its pipes and the file its error output goes to."""

    def __init__(
        self, module: str, arguments: Sequence[str], what: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """module: whose `main(lifeline, *arguments)` runs inside. what: of messages, "the kernel compiler". environment: what it has besides
        the parent's. Raises CompileError where it cannot be started."""
        self.outgoing = bytearray()
        self._received = bytearray()
        root = str(Path(__file__).parents[2])
        # The child's environment is the parent's: it decides nothing here but how many threads libraries start.
        # HOME, where it has none, is a place that nobody can put anything: compilers ask for one as they are imported, and keep nothing.
        variables = {
            "HOME": "/nonexistent",
            **os.environ,
            "LC_ALL": "C.UTF-8",  # `tells_of_shortage` reads what it says
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
                opened.pop_all()  # from here on `end` closes it
        except failures(OSError) as error:
            raise CompileError(f"{what} cannot be started: {error}", recurs=False) from error
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
        """Send as much of `outgoing` as the pipe takes."""
        try:
            del self.outgoing[: os.write(self.stdin, self.outgoing)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outgoing.clear()  # it died: `read` finds the end of its output

    def close_orders(self) -> None:
        """Close the child's input: the child reads its end, and gets no more orders."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def read(self) -> list[dict[str, object]] | None:
        """The answers that have arrived; None if no more can come."""
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
        """Seconds that a processor has worked for it, and for the children it has waited for; the time that went by where the system does not
        tell. Only differences mean something."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:15]  # proc_pid_stat(5): utime, stime, cutime, cstime
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        except failures(OSError, ValueError):
            return time.monotonic()

    def lower_priority(self) -> None:
        """Let this process's threads go first from now on, for good: calls run beside it. Nobody but root can undo that."""
        with ignored(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, self.process.pid, _BESIDE_CALLS)

    def wait(self, seconds: float) -> None:
        """Wait for the child's end, for at most this many seconds."""
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            time.sleep(0.005)

    def end(self) -> int:
        """Kill the process, if it still runs, and its children. Returns its exit status, negative for a signal."""
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
    """An exception that a child described (`inside.described`), with its traceback as a note. `what` it was about begins the message."""
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
