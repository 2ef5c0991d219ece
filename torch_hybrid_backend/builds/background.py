"""Background compilation: eager runs calls while a graph is compiled, checked and timed on copies of a call's inputs.

    InBackground: call -> eager's results; the build thread gets copies of the inputs
                  ...  the build thread makes the first call of the compiled graph on the copies; eager runs calls meanwhile
                  call -> the compiled graph, from now on; one assignment swaps the two

A process has one build thread. The thread runs its jobs in order, and ends when no job is left; PyTorch's threads for it end with it. Timings
that it takes are not kept (`timing_cache.keeping_none`). A job is cancelled when its graph is dropped or the interpreter ends (`cancellation`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_hybrid_backend.arguments import check_seconds
from torch_hybrid_backend.cancellation import Cancellation, Cancelled, cancellable
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import failures, is_sticky
from torch_hybrid_backend.generators import own_generator
from torch_hybrid_backend.measuring.timing_cache import keeping_none
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.torch_private import tree_leaves

_log = logging.getLogger(__name__)

_END_S = 5.0  # a cancelled job ends at its next step; the process does not wait longer than this for an operator


class Job:
    """Work for the build thread. `work` must not raise, and is released when it is done, with everything that `work` refers to."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.cancellation = Cancellation()
        self.pid = os.getpid()

    def run(self) -> None:
        """Run the work, in the build thread."""
        work, self.work = self.work, None
        try:
            with torch.no_grad(), cancellable(self.cancellation), keeping_none():
                if work is not None and not self.cancellation.is_cancelled:
                    work()
        except Cancelled:
            pass
        except BaseException:  # SystemExit from third-party code, say: the thread continues with the next job
            _log.exception("a build raised an error outside of its graph")


class BuildThread:
    """The thread of one process that builds. Thread-safe."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._awaited = 0
        # Runs before handlers that were registered earlier: compiler processes end after the jobs that wait for them.
        atexit.register(self.end)

    def submit(self, job: Job) -> None:
        """Append a job to the queue."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                # A daemon thread: the interpreter would otherwise wait for it before it calls `end`.
                self._thread = threading.Thread(target=self._work, name="hybrid-build", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no work is left. Returns False if that takes more than `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None and not self._awaited, timeout_s)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def expect(self) -> None:
        """Let `wait` also wait for something that is built elsewhere, until `arrived`."""
        with self._noted():
            self._awaited += 1

    def arrived(self) -> None:
        """Undo one `expect`."""
        with self._noted():
            self._awaited -= 1

    def end(self) -> None:
        """Cancel all jobs, and wait at most `_END_S` seconds for the running one."""
        if self.pid != os.getpid():
            return  # a forked child: the thread is its parent's
        with self._changed:
            thread = self._thread
            for job in (*self._jobs, *filter(None, [self._running])):
                job.cancellation.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = self._jobs.popleft() if self._jobs else None
                if self._running is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._running
            job.run()
            del job


_of_process: BuildThread | None = None
_lock = ForkLock()


def build_thread() -> BuildThread:
    """The build thread of this process; a forked child has its own."""
    global _of_process  # noqa: PLW0603
    thread = _of_process
    if thread is None or thread.pid != os.getpid():
        with _lock:
            if _of_process is None or _of_process.pid != os.getpid():
                _of_process = BuildThread()
            thread = _of_process
    return thread


def wait_for_builds(timeout_s: float | None = None) -> bool:
    """Wait for all background builds: of graphs under `options={"background": True}`, and of engines that build in processes.

    timeout_s: the most seconds to wait; None: no limit. Returns true if no build is left. A graph is built from its first call on, so a graph
    that was never called is not waited for. An engine that was built in a process of its own takes effect in the next call.

        model(x)                                            # eager answers; the build begins
        torch_hybrid_backend.wait_for_builds(60)
        model(x)                                            # as compiled

    Raises ArgumentError if `timeout_s` is no number, or negative.
    """
    check_seconds(timeout_s, "timeout_s")
    return build_thread().wait(timeout_s)


class InBackground:
    """A compiled graph, replaced by eager until the build thread has made its first call. Threads may call it at once.

    eager: the graph in eager. planned: the compiled graph, whose first call takes long. waits: true if a call of `planned` on these inputs
    would wait for a compiler or a measurement. copied: the inputs for the build thread, with copies of those that the caller may change. All
    four take the inputs of the graph. once: true if no call waits after one call of `planned`.

    An error of the build logs one WARNING, and eager goes on; under `strict` later calls raise the error.
    """

    def __init__(
        self,
        title: str,
        eager: Callable[..., Any],
        planned: Callable[..., Any],
        waits: Callable[..., bool],
        copied: Callable[..., Sequence[Any]],
        *,
        once: bool,
        strict: bool,
    ) -> None:
        self.title = title
        self._eager = eager
        self._planned = planned
        self._waits = waits
        self._copied = copied
        self._once = once
        self._strict = strict
        self._lock = ForkLock()
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._settled: Callable[..., Any] | None = None

    @property
    def compiling(self) -> bool:
        """True if a build is running, and eager runs calls meanwhile."""
        return self._job is not None

    def call(self, *inputs: Any) -> Any:
        """The graph's outputs."""
        settled = self._settled
        return self._meanwhile(inputs) if settled is None else settled(*inputs)

    def _meanwhile(self, inputs: tuple[Any, ...]) -> Any:
        if self._error is not None:
            raise self._error
        if not self._waits(*inputs):
            return self._planned(*inputs)
        held = [list(value) if isinstance(value, list) else value for value in inputs]  # lists may be cleared
        outputs = self._eager(*inputs)
        if self._job is None or self._job.pid != os.getpid():
            with self._lock:
                # Another thread may have submitted the job, or the build thread may have done it. A job from before a fork is the parent's.
                is_under_way = self._job is not None and self._job.pid == os.getpid()
                if not is_under_way and self._settled is None and self._error is None and self._waits(*held):
                    self._submit(held)
        return outputs

    def _submit(self, inputs: Sequence[Any]) -> None:
        try:
            copies = self._copied(*inputs)
        except failures(RuntimeError, MemoryError) as error:
            self._failed(error)
            return
        title, planned, done = self.title, self._planned, weakref.WeakMethod(self._done)
        ambient = as_here(copies)

        def work() -> None:
            error: Exception | None = None
            start = time.perf_counter()
            try:
                with ambient():
                    planned(*copies)
            except failures(Exception) as raised:  # any error: eager runs the calls
                error = raised
            _log.info("%s: built off the call in %.2f s", title, time.perf_counter() - start)
            if (tell := done()) is not None:
                tell(error)

        self._job = Job(work)
        weakref.finalize(self, self._job.cancellation.cancel).atexit = False
        build_thread().submit(self._job)

    def _done(self, error: Exception | None) -> None:
        with self._lock:
            self._job = None
            if error is not None:
                self._failed(error)
            elif self._once:
                self._settled = self._planned

    def _failed(self, error: Exception) -> None:
        if self._strict or is_sticky(error):
            self._error = error
            return
        _log.warning(
            "%s runs in eager: it could not be built off the call: %s: %s", self.title, type(error).__name__, error
        )
        self._settled = self._eager
        self._planned = self._eager


def copies_of(values: Sequence[Any], is_static: Callable[[int, Any], bool]) -> list[Any]:
    """The values of a call, with copies of the tensors that are not static. A copy has the same strides, also if elements share memory."""
    copies = [_copy(v) if isinstance(v, torch.Tensor) and not is_static(k, v) else v for k, v in enumerate(values)]
    made = sum(new.numel() * new.element_size() for new, old in zip(copies, values, strict=True) if new is not old)
    _log.info("%.1f MiB of a call's inputs are copied for a build", made / 2**20)
    return copies


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    if value.layout is not torch.strided or type(value) is not torch.Tensor:
        return value.clone()
    memory = LazyBits().view_of(value).as_strided((TensorSpec.of(value).span,), (1,)).clone()
    return LazyBits.of(value).view_of(memory.as_strided(value.shape, value.stride()))


def as_here(values: Sequence[Any]) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Context in which the build thread computes as this thread does.

    The context sets autocast, and one stream for each CUDA device of the tensors in `values`. Such a stream waits for the work of this thread's
    stream, and is synchronized at the end; no GPU has run this yet. The build thread gets random numbers of its own, so that it does not change
    this thread's generator."""
    state = torch.get_rng_state()
    autocast = [
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]
    recorded = [torch.cuda.current_stream(device).record_event() for device in _cuda_devices(values)]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(own_generator(state))
            for device, dtype in autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            for event in recorded:
                stream = torch.cuda.Stream(event.device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.callback(stream.synchronize)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return entered


def _cuda_devices(values: Sequence[Any]) -> list[torch.device]:
    return list({value.device: None for value in tree_leaves(values) if _is_on_cuda(value)})


def _is_on_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
