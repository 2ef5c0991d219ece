"""Lock between processes, so that only one of them builds a key, and the others take its result.

    lock = KeyLock.try_acquire(path)      # None: held by another process, or by other code in this process
    ...
    lock.release()

The operating system keeps the lock (flock(2)), and frees it at once if its holder dies. The file is removed on release, so a process may lock a
file that is no longer at the path: it checks this after locking. Unix only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from pathlib import Path

from torch_hybrid_backend.errors import failures, ignored

_log = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TRIES = 8  # a holder that releases the lock removes the file, and the folder if it is empty


class KeyLock:
    """A lock that this process holds. Owns the open file; without a file if the file system has no locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        _held.add(self)

    @staticmethod
    def try_acquire(path: Path) -> KeyLock | None:
        """Acquire the lock at `path` without waiting; None if another holds it. Missing folders are created."""
        for _ in range(_TRIES):
            try:
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(path, _FLAGS, 0o600)
            except FileNotFoundError:
                continue
            except failures(OSError) as error:
                return _none_at(path, error)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    return KeyLock(path, descriptor)
                os.close(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except failures(OSError) as error:
                os.close(descriptor)
                return _none_at(path, error)
        return None

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is None:
            return
        with ignored(OSError):
            if _is_at(self._descriptor, self._path):  # else the file was removed, and another holder's is at the path
                self._path.unlink()
        with ignored(OSError):  # unlock the file for all who have it open, such as a child that is just being forked
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()
        with ignored(OSError):  # the folder is not empty
            self._path.parent.rmdir()

    def forget(self) -> None:
        """Close the file. In a forked child the parent still holds the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the open file is at the path."""
    try:
        there = path.lstat()
    except failures(OSError):
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _none_at(path: Path, error: OSError) -> KeyLock:
    _log.info("no lock can be made at %s (%s): another process may build the same key", path, error)
    return KeyLock(path, None)


_held: weakref.WeakSet[KeyLock] = weakref.WeakSet()


def _after_fork() -> None:
    """Close inherited lock files: an open descriptor would keep the lock for as long as the child lives."""
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_after_fork)
