"""Builds that take minutes and cannot be interrupted in a thread. Each runs in a process of its own, which can be asked to stop, and killed.

    builds = Builds(store, "engines")
    build = builds.start(key, "package.module:function", request, deadline_s=600)
    build.done, build.progress              # without waiting
    build.result(timeout=5)                 # the bytes; raises the build's error, or TimeoutError if the build is still running
    build.when_done(callback)
    build.cancel()

The child runs `function(request: bytes, going_on: Callable[[float], bool]) -> bytes`. The function calls `going_on(fraction done)` as often as
it can. `going_on` returns false at the deadline, or when all users have cancelled the build. Then the function should end soon; after `grace_s`
seconds the child is killed.

Result bytes are kept in the store, under the kind and the key. A key names everything that the result depends on, versions and the device
included. A failed build is remembered under its key for a day (`failures`). Corrupt entries are built anew, and so are useless entries with
`rebuild`. Of several processes that share a store, one builds a key (`key_lock`). The others wait for its result within their deadlines, and
one of them takes over if there is none. Unix only.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.builds.key_lock import KeyLock
from torch_hybrid_backend.builds.main import REQUEST, RESULT
from torch_hybrid_backend.errors import (
    BuildCancelledError,
    CacheError,
    CompileError,
    CompilerCrashError,
    DeadlineError,
    failures,
)
from torch_hybrid_backend.processes.child import Child, End, as_exception
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_log = logging.getLogger(__name__)

_SELF_LIMIT_S = 5.0  # a child ends itself this long after its parent would have killed it
_LAST_S = 5.0
_LOOK_EVERY_S = 0.1  # interval of checks for the result of another process
_CLOSE_S = 5.0  # killed processes end at once; the threads that wait for them may take a moment


class Build:
    """A user's handle of a build. Users that start the same key share one build. Thread-safe."""

    def __init__(self, task: _Task, builds: Builds) -> None:
        self._task = task
        self._builds = builds  # keeps the processes alive, which end with `builds`
        self._is_held = True

    @property
    def key(self) -> str:
        """The key with which the build was started."""
        return self._task.key

    @property
    def done(self) -> bool:
        """True if `result` returns or raises without waiting."""
        return self._task.finished.is_set()

    @property
    def progress(self) -> float:
        """The fraction done, as the builder reported."""
        return self._task.progress

    def result(self, timeout: float | None = None) -> bytes:
        """The result's bytes. Waits for at most `timeout` seconds (None: until the deadline and the grace after it).

        Raises TimeoutError if the build is not done by then; BuildCancelledError if all users have cancelled it, or this process ends;
        DeadlineError, CompilerCrashError (the child died) or CompileError if the build failed, now or within the last day.
        """
        if self._task.pid != os.getpid():
            raise BuildCancelledError(f"the build of {self.key} belongs to the process that this one was forked from")
        if not self._task.finished.wait(timeout):
            raise TimeoutError(f"the build of {self.key} is not done after {timeout:g} s")
        outcome = self._task.outcome
        assert outcome is not None
        if isinstance(outcome, CompileError):
            raise outcome
        return outcome

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` once when the build is done, in a thread of the builds; at once if the build is done already. `call` must not block."""
        self._task.when_done(call)

    def cancel(self) -> None:
        """Give up this handle. The build is stopped when all users have given up theirs."""
        if self._is_held and self._task.pid == os.getpid():
            self._is_held = False
            self._task.let_go()


class Builds:
    """The builds of one kind of results. Owns their processes; thread-safe.

    A forked child has none of its parent's builds, and starts its own. At the interpreter's end processes are killed.
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        *,
        at_once: int = 1,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """kind: of the results in the store. at_once: the number of processes; builders that time kernels disturb one another. grace_s: seconds
        that a builder may take to stop. clock: seconds since 1970, for remembered failures."""
        self._store = store
        self._kind = kind
        self._at_once = at_once
        self._grace_s = grace_s
        self._failures = Failures(store, clock)
        self._of_process: _Queue | None = None
        self._lock = threading.Lock()

    def start(self, key: str, entry: str, request: bytes, deadline_s: float, *, rebuild: bool = False) -> Build:
        """Start a build without waiting. If the key is being built, that build is returned; if the store has its result or failure, a build
        that is done.

        Builds queue, so the deadline counts from the start of the child. If another process builds the key, the deadline counts from when that
        is noticed.
        entry: "package.module:function", which the child imports. rebuild: ignore the store's result or failure. Raises CompileError for an
        entry of another form, CacheError for a key that cannot name an entry of the store.
        """
        module, separator, name = entry.partition(":")
        if not (separator and module.replace(".", "").isidentifier() and name.isidentifier()):
            raise CompileError(f"{entry!r} names no builder; it must be package.module:function")
        if rebuild:
            self._store.remove(self._kind, key)
            self._failures.remove(self._kind, key)
        return Build(self._queue().start(_Task(key, entry, request, deadline_s)), self)

    def reject(self, key: str, error: CompileError) -> None:
        """Remove the result of a key from the store. Later builds of the key fail with `error`, as long as failures are remembered."""
        self._store.remove(self._kind, key)
        self._failures.put(self._kind, key, error)

    def process_ids(self) -> list[int]:
        """The ids of the running child processes, for diagnosis."""
        return self._queue().process_ids()

    def close(self) -> None:
        """Kill all running builds. New builds can be started afterwards."""
        self._queue().close()

    def _queue(self) -> _Queue:
        with self._lock:
            queue = self._of_process
            if queue is None or queue.pid != os.getpid():
                self._of_process = queue = _Queue(self._store, self._kind, self._failures, self._at_once, self._grace_s)
                weakref.finalize(self, queue.close)
            return queue


class _Task:
    """A build with its number of users and its outcome."""

    def __init__(self, key: str, entry: str, request: bytes, deadline_s: float) -> None:
        self.key = key
        self.entry = entry
        self.request = request
        self.deadline_s = deadline_s
        self.pid = os.getpid()
        self.progress = 0.0
        self.outcome: bytes | CompileError | None = None
        # The deadline by `time.monotonic`, once the build has begun or waits for another process.
        self.until: float | None = None
        self.has_waited = False
        self.finished = threading.Event()
        # Written to when all users have cancelled: this wakes the thread that waits for the child.
        self.wake, self._waker = os.pipe()
        self._lock = threading.Lock()
        self._holders = 0
        self._is_stopped = False
        self._calls: list[Callable[[], None]] = []

    @property
    def is_wanted(self) -> bool:
        return not self._is_stopped

    def hold(self) -> bool:
        """Count one more user. False if the build was stopped, because all users had cancelled it."""
        with self._lock:
            if self._is_stopped:
                return False
            self._holders += 1
            return True

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            self.stop()

    def stop(self) -> None:
        """Stop the build for all its users."""
        with self._lock:
            if not self.finished.is_set():
                self._is_stopped = True
                os.write(self._waker, b"\0")

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.finished.is_set():
                self._calls.append(call)
                return
        call()

    def finish(self, outcome: bytes | CompileError) -> None:
        with self._lock:
            if self.finished.is_set():
                return
            self.outcome = outcome
            self.progress = 1.0
            self.request = b""
            self.finished.set()
            os.close(self.wake)
            os.close(self._waker)
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except failures(Exception):  # an error of the callback must not keep the other callbacks from being called
                _log.exception("a callback after the build of %s raised an error", self.key)


class _Queue:
    """The builds of one process: running builds, each with a thread that waits for its child, and queued builds."""

    def __init__(self, store: Store, kind: str, failures: Failures, at_once: int, grace_s: float) -> None:
        self.pid = os.getpid()
        self._store = store
        self._kind = kind
        self._failures = failures
        self._at_once = at_once
        self._grace_s = grace_s
        self._lock = threading.Condition()  # notified when there is more to do
        self._tasks: dict[str, _Task] = {}  # not finished
        self._waiting: deque[_Task] = deque()
        self._threads: dict[threading.Thread, Child | None] = {}
        self._is_closed = False

    def start(self, task: _Task) -> _Task:
        """The running task of the same key, or `task` itself, which is done if its outcome is known."""
        known = self._known(task)
        with self._lock:
            under_way = self._tasks.get(task.key)
            if under_way is not None and under_way.hold():
                task.finish(_cancelled(task))  # frees its pipe
                return under_way
            task.hold()
            if known is None:
                self._is_closed = False
                self._tasks[task.key] = task
                self._waiting.append(task)
                self._lock.notify()
                if len(self._threads) < self._at_once:
                    # A daemon thread: the interpreter does not wait for it, and `close` ends its child.
                    thread = threading.Thread(target=self._work, name=f"hybrid-builds-{self._kind}", daemon=True)
                    self._threads[thread] = None
                    thread.start()
        if known is not None:
            task.finish(known)
        return task

    def process_ids(self) -> list[int]:
        with self._lock:
            return sorted(child.process.pid for child in self._threads.values() if child is not None and child.alive)

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # a forked child: the builds are its parent's
        with self._lock:
            self._is_closed = True
            tasks, threads = list(self._tasks.values()), list(self._threads)
        for task in tasks:
            task.stop()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def _work(self) -> None:
        thread = threading.current_thread()
        while (task := self._next(thread)) is not None:
            try:
                outcome = self._outcome(task, thread)
            except failures(Exception) as error:  # a full disk, say: users must not wait for ever
                outcome = CompileError(f"{task.key} cannot be built: {type(error).__name__}: {error}")
            if outcome is None:  # another process builds it: continue with other tasks
                with self._lock:
                    self._waiting.append(task)
                    if all(each.has_waited for each in self._waiting):
                        self._lock.wait(_LOOK_EVERY_S)
                continue
            with self._lock:
                if self._tasks.get(task.key) is task:
                    del self._tasks[task.key]
            task.finish(outcome)

    def _next(self, thread: threading.Thread) -> _Task | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            del self._threads[thread]
            return None

    def _known(self, task: _Task) -> bytes | CompileError | None:
        """The build's result or error in the store; None if there is neither."""
        result = self._store.get(self._kind, task.key)
        if result is not None:
            return result
        failure = self._failures.get(self._kind, task.key, task.deadline_s)
        return failure.as_exception() if failure is not None else None

    def _outcome(self, task: _Task, thread: threading.Thread) -> bytes | CompileError | None:
        """The outcome of the build, in this process or another; None while another process is building."""
        if not task.is_wanted:
            return _cancelled(task)
        lock = KeyLock.try_acquire(self._store.lock_path(self._kind, task.key))
        now = time.monotonic()
        if task.until is None:
            task.until = now + task.deadline_s
        if lock is None:
            if not task.has_waited:
                _log.info("another process builds %s: waiting for its result", task.key)
            task.has_waited = True
            if now < task.until:
                return None
            return DeadlineError(
                f"{task.key} was not built within {task.deadline_s:.3g} s by another process, which is still at it"
            )
        try:
            known = self._known(task)  # another process may just have built it
            return self._built(task, thread) if known is None else known
        finally:
            lock.release()

    def _built(self, task: _Task, thread: threading.Thread) -> bytes | CompileError:
        with TemporaryFolder() as folder:
            (folder / REQUEST).write_bytes(task.request)
            limit_s = task.deadline_s + self._grace_s + _SELF_LIMIT_S
            child = Child("torch_hybrid_backend.builds.main", [task.entry, str(folder), f"{limit_s:.3f}"], "a builder")
            child.lower_priority()
            with self._lock:
                self._threads[thread] = child
            try:
                stopped = self._watched(task, child)
            finally:
                with self._lock:
                    self._threads[thread] = None
                child.end()
            if stopped is None:
                result = (folder / RESULT).read_bytes()
                self._keep(task, result)
                return result
        if not isinstance(stopped, BuildCancelledError):
            self._failures.put(self._kind, task.key, stopped, task.deadline_s)
        return stopped

    def _watched(self, task: _Task, child: Child) -> CompileError | None:
        """Wait for the child's end. Returns the error; None if there is a result."""
        assert task.until is not None
        until = task.until
        is_told = False
        while True:
            now = time.monotonic()
            if not is_told and (now >= until or not task.is_wanted):
                is_told = True
                child.close_orders()
                until = now + self._grace_s
            if self._is_closed or (is_told and now >= until):
                return self._stopped(task, child, "it did not stop when it was told to, and was killed")
            ready = select.select([child.stdout, task.wake], [], [], until - now)[0]
            if task.wake in ready:
                os.read(task.wake, 1)
            if child.stdout not in ready:
                continue
            answers = child.read()
            if answers is None:
                return self._stopped(task, child, "it ended when it was told to") if is_told else _died(task, child)
            for answer in answers:
                if "progress" in answer:
                    task.progress = float(str(answer["progress"]))
                elif answer["error"] is None:
                    return None
                elif is_told:
                    return self._stopped(task, child, "it stopped when it was told to")
                else:
                    return as_exception(f"{task.key} was not built", answer["error"])

    def _stopped(self, task: _Task, child: Child, how: str) -> CompileError:
        if not task.is_wanted:
            return _cancelled(task)
        why = f"{task.key} was not built within {task.deadline_s:.3g} s; {how}"
        # A build that waited before it began did not have all of its time.
        return DeadlineError(why, had_s=0.0 if task.has_waited else child.processor_s())

    def _keep(self, task: _Task, result: bytes) -> None:
        try:
            self._store.remove(self._kind, task.key)
            self._store.put(self._kind, task.key, result)
        except failures(CacheError, OSError) as error:
            _log.info("the result of a build is not kept: %s", error)


def _cancelled(task: _Task) -> BuildCancelledError:
    return BuildCancelledError(f"the build of {task.key} was cancelled")


def _died(task: _Task, child: Child) -> CompilerCrashError:
    words = child.last_words()
    child.wait(_LAST_S)  # the child closed its output and is about to end: wait for its own exit status
    status = child.end()
    end = End(status, words)
    return CompilerCrashError(f"the process that built {task.key} {end.how}.{end.said}", recurs=end.recurs)
