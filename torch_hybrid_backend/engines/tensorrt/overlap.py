"""Changes of process-wide state by several threads at once: of warnings, loggers and a class of torch_tensorrt.

If each thread saves and restores the state, it ends wrong: A saves, B saves A's change, A restores, and B restores A's change for good.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import TracebackType


class SharedContext:
    """Context manager that threads share: the first thread to enter changes the state, the last one to leave restores it.

    Each kind of change has one instance, which lives as long as the process.

        quiet = SharedContext(lambda: contextlib.redirect_stderr(None))
        with quiet: ...
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._undo = contextlib.ExitStack()
        os.register_at_fork(after_in_child=self._reset)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._undo.enter_context(self._change())
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo.close()

    def _reset(self) -> None:
        """Restore the state in a forked child, which has none of the threads that were inside."""
        self._lock = threading.Lock()
        self._inside = 0
        self._undo.close()
