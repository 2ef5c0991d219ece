"""Worker processes as their parent sees them: start, messages, processor time, end.

A worker runs `bench.worker`, exchanges messages with its parent through a pipe, and prints to a file. A worker leads a process group, which is
killed with it: compilers that it started end too. A worker also ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from torch_hybrid_backend.bench.worker import Failed
from torch_hybrid_backend.errors import ignored

ROOT = Path(__file__).resolve().parents[2]  # the folder of this package
_END_S = 20.0  # time to unload a compiled model and exit
# Spinning threads use all of a core; a process that waits for a pipe uses none.
_QUIET_SHARE = 0.05
_QUIET_STEP_S = 0.02
# Imports the package from the tree `root`, all else as the parent does. An older tree, whose package has no `bench`, uses the one here.
_BOOTSTRAP = """
import sys
root, package, lifeline, descriptor, *folders = sys.argv[1:]
sys.path.insert(0, root)
import torch_hybrid_backend
del sys.path[0]
sys.path.extend(folder for folder in folders if folder not in sys.path)
torch_hybrid_backend.__path__.append(package)
from torch_hybrid_backend.bench.worker import main
main(int(lifeline), int(descriptor))
"""


class WorkerError(RuntimeError):
    """A worker gave no answer: it raised an error, ended, or took too long. `is_explained`: True if the message is a sentence for the user."""

    def __init__(self, why: str, *, is_explained: bool = False) -> None:
        super().__init__(why)
        self.is_explained = is_explained


class WorkerProcess:
    """Owner of one worker process. `end` ends the process; a `with` block calls it."""

    def __init__(self, environment: Mapping[str, str], log: Path, tree: Path = ROOT) -> None:
        """Start the worker. environment: variables besides those of this process. log: file to which its output is appended. tree: folder
        from which it imports this package."""
        ours, theirs = Pipe()
        lifeline, other_end = os.pipe()
        self._lifeline = os.fdopen(other_end, "wb", buffering=0)
        package = str(ROOT / __package__.partition(".")[0])
        arguments = [str(tree), package, str(lifeline), str(theirs.fileno()), *filter(None, sys.path)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments],
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno(), lifeline],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        theirs.close()
        os.close(lifeline)
        self._connection: Connection = ours

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, message: object, within_s: float) -> Any:
        """The worker's answer to `message`. Without an answer within `within_s` seconds, end the worker and raise WorkerError."""
        try:
            self._connection.send(message)
            answered = self._connection.poll(within_s)
            answer = self._connection.recv() if answered else None
        except (EOFError, ConnectionError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self.end()
            raise WorkerError(f"the process {_manner(self._process.returncode)}") from error
        if answered and not isinstance(answer, Failed):
            return answer
        self.end()
        if isinstance(answer, Failed):
            raise WorkerError(answer.why, is_explained=answer.is_explained)
        raise WorkerError(f"no answer within {within_s:.0f} s")

    def cpu_ns(self) -> int:
        """Processor time of all threads of the worker, in nanoseconds; 0 if the system does not report it."""
        total = 0
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with ignored(OSError):  # the thread has just ended
                total += int(path.read_text().split()[0])
        return total

    def end(self) -> None:
        """Close the pipe, and kill the process group of the worker."""
        self._connection.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._lifeline.close()


def _manner(code: int | None) -> str:
    if code is None:
        return "closed its pipe but still runs"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def wait_until_quiet(workers: Sequence[WorkerProcess], at_most_s: float = 0.5) -> float:
    """Wait until the workers together use almost no processor time. Returns the seconds waited, about `at_most_s` at most.

    Threads of OpenMP and of other pools spin for up to 200 ms after their work. A peer timed meanwhile would share the cores with them.
    """
    start = time.perf_counter()
    before, at = sum(worker.cpu_ns() for worker in workers), start
    while True:
        time.sleep(_QUIET_STEP_S)
        now, used = time.perf_counter(), sum(worker.cpu_ns() for worker in workers)
        if used - before <= _QUIET_SHARE * (now - at) * 1e9 or now - start > at_most_s:
            return now - start
        before, at = used, now
