"""The pool of kernel compiler processes.

    compiler = KernelCompiler(module, threads=2)
    for made in compiler.compile([Job(...), Job(...)], deadline_s=60):   # a Path, or the exception that stopped the job
        ...

Processes start when first needed, and end when idle for a while. A process that dies costs the job that it worked at, and a process that hangs
is killed at the deadline; other jobs go on. Processes are plain subprocesses: multiprocessing would import the user's script again. If no
Python is found to start, kernels are compiled in this process. Unix only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_hybrid_backend.cancellation import is_awaited, patience
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule, compiler_version
from torch_hybrid_backend.codegen.workers.process import CompilerProcess
from torch_hybrid_backend.codegen.workers.protocol import IDLE_EXIT_STATUS, Job, Order
from torch_hybrid_backend.errors import CompileError, CompilerCrashError, DeadlineError, failures
from torch_hybrid_backend.processes.child import End, as_exception
from torch_hybrid_backend.processes.frames import frame
from torch_hybrid_backend.processes.inside import described
from torch_hybrid_backend.processes.interpreter import NO_INTERPRETER, interpreter

_log = logging.getLogger(__name__)

Finished = Callable[[Job, Path | CompileError], None]

_JOBS_PER_PROCESS = 4  # starting a process takes about as long as compiling so many kernels
_STARTS = 2  # a process may be killed by chance while it starts; twice is no chance
_GRACE_S = 5.0
_OTHER_SOURCES = (
    "the kernel compiler runs other sources of torch_hybrid_backend (or another version of what it compiles with) than this process, which "
    "imported them before they were changed: its kernels would be kept under the wrong key. Start this process again"
)


class KernelCompiler:
    """Compiles kernels with `module` in up to `threads` processes. Owns them; thread-safe.

    After a fork the child starts processes of its own. They end with this object, with the interpreter, or after `idle_s` seconds without work.
    """

    def __init__(self, module: KernelCompilerModule, threads: int, idle_s: float = 60.0) -> None:
        self.module = module
        self._threads = max(1, threads)
        self._idle_s = idle_s
        self._of_process: _Processes | None = None

    def start(self, jobs: int) -> None:
        """Start, without waiting, the processes that so many jobs would use: they load the compiler while the caller prepares the jobs."""
        self.start_processes(self._wanted(jobs))

    def start_processes(self, count: int) -> None:
        """Start processes likewise until there are so many, or as many as there are to be at most."""
        with contextlib.suppress(CompileError):  # `compile` will meet the same and report it
            self._processes().start(count)

    def compile(
        self, jobs: Sequence[Job], deadline_s: float, finished: Finished = lambda job, made: None
    ) -> list[Path | CompileError]:
        """Compile the jobs in parallel, those of one key once; gives, job by job, the artifact or what stopped it. Calls `finished` with each
        of the distinct jobs and its result as soon as there is one.

        The exception is CompilerCrashError where the compiler died at the job, DeadlineError where the job was not finished within
        `deadline_s` seconds from now, ScheduleError where no schedule serves the kernel, and CompileError for anything else.
        """
        if not jobs:
            return []
        distinct = list({job.key: job for job in reversed(jobs)}.values())[::-1]
        if interpreter() is None:
            made = _compile_here(self.module, distinct, deadline_s, finished)
        else:
            made = _Batch(self._processes(), distinct, deadline_s, self._wanted(len(distinct)), finished).run()
        return [made[job.key] for job in jobs]

    def close(self) -> None:
        """End the processes. The compiler can be used again: it starts new ones."""
        self._processes().close()

    def process_ids(self) -> list[int]:
        """The compiler processes there are, for diagnosis."""
        return self._processes().ids()

    def _wanted(self, jobs: int) -> int:
        return min(self._threads, math.ceil(jobs / _JOBS_PER_PROCESS))

    def _processes(self) -> _Processes:
        found = self._of_process
        if found is None or found.pid != os.getpid():
            # Two threads may get here at once: both see the one that was stored last.
            self._of_process = found = _Processes(self.module, self._threads, self._idle_s)
            weakref.finalize(self, found.close)
        return found


_here = threading.Lock()


def _compile_here(
    module: KernelCompilerModule, jobs: Sequence[Job], deadline_s: float, finished: Finished
) -> dict[str, Path | CompileError]:
    """Compile in this process, one job after the other. A compiler's crash ends the process, and the deadline stops no job at work."""
    until = time.monotonic() + deadline_s
    made: dict[str, Path | CompileError] = {}
    _warn_of_no_interpreter()
    with _here:
        for job in jobs:
            try:
                if time.monotonic() >= until:
                    raise DeadlineError(_late(job, deadline_s), had_s=0.0)
                module.load()
                module.compile_kernel(job)
                made[job.key] = Path(job.output)
            except DeadlineError as error:
                made[job.key] = error
            except failures(Exception) as error:  # as in a process of its own: the job's failure is the answer to it
                made[job.key] = as_exception(f"{job.symbol} was not compiled", described(error))
            finished(job, made[job.key])
    return made


@functools.cache
def _warn_of_no_interpreter() -> None:
    _log.warning("kernels are compiled in this process, which a fault of the compiler would end: %s", NO_INTERPRETER)


def _late(job: Job, deadline_s: float) -> str:
    return (
        f"{job.symbol} was not compiled within the {deadline_s:.3g} s that were left for it (HYBRID_COMPILE_DEADLINE_S)"
    )


class _Processes:
    """The compiler processes of one process: the idle ones, and their number."""

    def __init__(self, module: KernelCompilerModule, limit: int, idle_s: float) -> None:
        self.pid = os.getpid()
        self.module = module
        self._limit = limit
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._idle: list[CompilerProcess] = []
        self._all: set[CompilerProcess] = set()
        self._batches: weakref.WeakSet[_Batch] = weakref.WeakSet()

    def start(self, count: int) -> None:
        with self._changed:
            while len(self._all) < min(count, self._limit):
                self._idle.append(self._new())

    def take(self, batch: _Batch, until: float | None) -> CompilerProcess | None:
        """An idle or a new process for `batch`. If all are in use, wait for one `until` that time (None: do not wait), then return None."""
        with self._changed:
            self._batches.add(batch)
            while True:
                while self._idle:
                    worker = self._idle.pop()
                    if worker.alive:
                        batch.workers.append(worker)
                        return worker
                    self._drop(worker)
                self._drop_lost()
                if len(self._all) < self._limit:
                    batch.workers.append(self._new())
                    return batch.workers[-1]
                left = until - time.monotonic() if until is not None else 0.0
                if left <= 0:
                    return None
                self._changed.wait(patience(left))

    def give_back(self, worker: CompilerProcess) -> None:
        with self._changed:
            self._idle.append(worker)
            self._changed.notify()

    def discard(self, worker: CompilerProcess) -> int:
        """End a process for good, and return its exit status."""
        with self._changed:
            status = self._drop(worker)
            self._changed.notify()
        return status

    def ids(self) -> list[int]:
        with self._changed:
            return sorted(worker.process.pid for worker in self._all if worker.alive)

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # a forked child: they are its parent's
        with self._changed:
            for worker in list(self._all):
                self._drop(worker)
            self._idle.clear()
            self._changed.notify_all()

    def _new(self) -> CompilerProcess:
        worker = CompilerProcess(self.module, self._idle_s)
        self._all.add(worker)
        return worker

    def _drop_lost(self) -> None:
        """End processes without an owner: Ctrl-C may interrupt between any two steps, also in the handling of an earlier one."""
        held = {worker for batch in self._batches if batch.running for worker in batch.workers}
        for worker in self._all - held - set(self._idle):
            self._drop(worker)

    def _drop(self, worker: CompilerProcess) -> int:
        self._all.discard(worker)
        return worker.end()


class _Batch:
    """A call of `compile`: gives jobs to processes that are ready, and collects the answers, in the calling thread."""

    def __init__(
        self, processes: _Processes, jobs: Sequence[Job], deadline_s: float, wanted: int, finished: Finished
    ) -> None:
        self._processes = processes
        self._deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s
        self._pending = deque(jobs)
        self._wanted = wanted
        self._finished = finished
        self.workers: list[CompilerProcess] = []
        self.running = True
        self._failed_starts = 0
        self._made: dict[str, Path | CompileError] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> dict[str, Path | CompileError]:
        """Results by key. If an exception interrupts it (Ctrl-C), processes at work are killed, and the others given back."""
        try:
            while self._pending or any(worker.job for worker in self.workers):
                if time.monotonic() < self._until:
                    self._hire()
                if not self.workers or time.monotonic() >= self._until:
                    self._stop_at_deadline()
                    break
                for key, events in self._selector.select(patience(self._until - time.monotonic())):
                    worker: CompilerProcess = key.data
                    # Both pipes of a process may be ready at once, and what is read may have been its end.
                    if events & selectors.EVENT_WRITE and worker in self.workers:
                        self._write(worker)
                    if events & selectors.EVENT_READ and worker in self.workers:
                        self._read(worker)
        finally:
            try:
                for worker in list(self.workers):
                    self._release(worker, usable=worker.job is None)
                self._selector.close()
            finally:
                self.running = False
        return self._made

    def _hire(self) -> None:
        """Take processes for pending jobs, as many as wanted; wait for one only if this batch has none."""
        while self._pending and len(self.workers) < min(self._wanted, len(self._pending) + self._busy):
            try:
                worker = self._processes.take(self, None if self.workers else self._until)
            except CompileError as error:
                self._fail_pending(error)
                return
            if worker is None:
                return
            if not is_awaited():
                worker.lower_priority()
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
            self._order(worker)

    @property
    def _busy(self) -> int:
        return sum(worker.job is not None for worker in self.workers)

    def _order(self, worker: CompilerProcess) -> None:
        """Give the next job to a process that is ready; give the process back if no job is left."""
        while worker.ready and self._pending:
            job = self._pending.popleft()
            order = Order(job, max(self._until - time.monotonic(), 0.0) + _GRACE_S)
            try:
                payload = pickle.dumps(order)
            except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
                why = f"{job.symbol} cannot be sent to the compiler: {error}"
                self._finish(job, CompileError(why, recurs=False))
                continue
            worker.job, worker.began = job, worker.processor_s()
            worker.outgoing += frame(payload)
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            return
        if not self._pending:
            self._release(worker, usable=True)

    def _write(self, worker: CompilerProcess) -> None:
        worker.write()
        if not worker.outgoing:
            self._selector.unregister(worker.stdin)

    def _read(self, worker: CompilerProcess) -> None:
        answers = worker.read()
        if answers is None:
            self._died(worker)
            return
        for answer in answers:
            if "ready" in answer:
                worker.ready = bool(answer["ready"]) and answer["version"] == compiler_version(self._processes.module)
                if not worker.ready:
                    self._release(worker, usable=False)
                    error = (
                        CompileError(_OTHER_SOURCES)
                        if answer["ready"]
                        else as_exception("the kernel compiler cannot start", answer["error"])
                    )
                    error.recurs = False  # what the kernels are had no part in it
                    self._fail_pending(error)
                    return
            elif worker.job is not None:
                job, worker.job = worker.job, None
                failure = answer["error"]
                why = f"{job.symbol} was not compiled"
                self._finish(job, as_exception(why, failure) if failure else Path(job.output))
            self._order(worker)

    def _died(self, worker: CompilerProcess) -> None:
        job, started, words = worker.job, worker.ready, worker.last_words()
        # Its output has ended, so it is about to end: let it, for the sake of its exit status.
        worker.wait(_GRACE_S)
        status = self._release(worker, usable=False)
        if started and status == IDLE_EXIT_STATUS:
            if job is not None:
                self._pending.appendleft(job)
            return
        end = End(status, words)
        if job is not None:
            kind = type(job.kernel).__name__
            why = f"the kernel compiler {end.how} while it compiled {job.symbol}, a {kind}.{end.said}"
            self._finish(job, CompilerCrashError(why, recurs=end.recurs))
            return
        self._failed_starts += not started
        if self._failed_starts >= _STARTS:
            why = f"the kernel compiler ({interpreter()}) {end.how} before it was ready.{end.said}"
            self._fail_pending(CompileError(why, recurs=False))

    def _finish(self, job: Job, made: Path | CompileError) -> None:
        self._made[job.key] = made
        self._finished(job, made)

    def _release(self, worker: CompilerProcess, *, usable: bool) -> int:
        """Take a process out of this batch; returns its exit status if it ended."""
        for descriptor in (worker.stdin, worker.stdout):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        status = 0
        if usable:
            self._processes.give_back(worker)
        else:
            status = self._processes.discard(worker)
        self.workers.remove(worker)  # last: somebody has it at any time
        return status

    def _fail_pending(self, error: CompileError) -> None:
        for job in self._pending:
            self._finish(job, error)
        self._pending.clear()

    def _stop_at_deadline(self) -> None:
        late = [(worker.job, worker.processor_s() - worker.began) for worker in self.workers if worker.job is not None]
        for job, had_s in (*late, *((job, 0.0) for job in self._pending)):
            self._finish(job, DeadlineError(_late(job, self._deadline_s), had_s=had_s))
        self._pending.clear()
