"""A lock that one process at a time has: what two would build, one builds, and the other takes its result.

    lock = KeyLock.taken(path)      # None: another process has it, or another asker in this one
    ...
    lock.release()

The kernel keeps it (flock(2)): where its holder dies it is free at once. The file is removed on release, so a file that is locked may be one
that the path does not lead to any more: who locks it looks. Unix only.
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
_TRIES = 8  # a holder that leaves takes the file, and the folder where it is empty, with it


class KeyLock:
    """A lock that this process has; one on nothing where the file system has no locks. Owns the open file."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        _held.add(self)

    @staticmethod
    def taken(path: Path) -> KeyLock | None:
        """The lock at `path`, whose folder is made where it is absent, without waiting; None where another has it."""
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
        """Let others have it."""
        if self._descriptor is None:
            return
        with ignored(OSError):
            if _is_at(self._descriptor, self._path):  # else it is another's, after somebody has removed this one
                self._path.unlink()
        with ignored(OSError):  # for all who have the file open: a child that is just being forked, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()
        with ignored(OSError):  # there is an entry
            self._path.parent.rmdir()

    def forget(self) -> None:
        """Close the file: where this is a forked child, its parent has the lock still."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the path leads to the open file."""
    try:
        there = path.lstat()
    except failures(OSError):
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _none_at(path: Path, error: OSError) -> KeyLock:
    _log.info("there can be no lock at %s (%s): another process may build the same", path, error)
    return KeyLock(path, None)


_held: weakref.WeakSet[KeyLock] = weakref.WeakSet()


def _after_fork() -> None:
    """A descriptor of a locked file keeps the lock, and a child would for as long as it lives."""
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_after_fork)
