"""Changes of the process's state that threads make beside one another: of warnings, of loggers, of a class of torch_tensorrt's.

What saves and restores does it in the wrong order there: A saves, B saves A's change, A restores, and B restores A's change, for good.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import TracebackType


class Overlapping:
    """The state is changed while any thread is inside: the first to come changes it, the last to go undoes that. One for each kind of change,
    and it lives as long as the process.

        quiet = Overlapping(lambda: contextlib.redirect_stderr(None))
        with quiet: ...
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._inside = 0
        self._undo = contextlib.ExitStack()
        os.register_at_fork(after_in_child=self._alone)

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

    def _alone(self) -> None:
        """In a forked child, which has none of the threads that were inside."""
        self._lock = threading.Lock()
        self._inside = 0
        self._undo.close()
