"""Lock of a host: of all processes that tune on it, one times at a time.

The lock is a name of Linux's abstract sockets: it is one for all users of a network namespace, needs no file, and the system frees it when
its holder dies. Processes in containers with network namespaces of their own do not see each other.
"""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path

from torch_hybrid_backend.cancellation import check
from torch_hybrid_backend.errors import HybridError, failures

_NAME = "\0torch_hybrid_backend.tuning"
_LOOK_EVERY_S = 0.05


class HostLock:
    """The lock of this host, not held at first. Not thread-safe."""

    def __init__(self, name: str = _NAME) -> None:
        self._name = name
        self._socket: socket.socket | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._socket is not None

    def acquire(self) -> None:
        """Wait for the lock. Raises HybridError where the system has no such locks."""
        while not self.try_acquire():
            check()
            time.sleep(_LOOK_EVERY_S)

    def try_acquire(self) -> bool:
        """Take the lock, unless another holds it; True if it is held now."""
        if self._socket is not None:
            return True
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(self._name)
        except failures(OSError) as error:
            bound.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise HybridError(f"this host's lock for tuning cannot be taken: {error}") from error
        self._socket = bound
        return True

    def release(self) -> None:
        """Let another take the lock."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def give_way(self) -> None:
        """Release the lock for as long as others that wait for it need to take it, then wait for it."""
        self.release()
        time.sleep(2 * _LOOK_EVERY_S)
        self.acquire()


def host() -> str:
    """This host's boot id, which all containers on it share; its name where the system tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except failures(OSError):
        return socket.gethostname()
