"""Folders for what a process needs on disk as long as it lives, or for one build. Utility: imports errors only.

    with TemporaryFolder() as path: ...
    folder = TemporaryFolder()       # folder.path, until the object is gone

A process that ends by a signal, or as a forked child that leaves by os._exit, removes nothing: whoever makes a folder next removes what others
have left. Each process has its folders locked (flock(2)); one that is not locked is nobody's. Unix only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from torch_hybrid_backend.errors import ignored

# No other file is ever removed. A cache may lie beside them (`config`), under another name.
_PREFIX = "torch_hybrid_backend.tmp-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_S = 60.0  # a folder as new as that may be one that its process is about to lock

_tidied: set[tuple[int, str]] = set()  # (process, directory) of which this process has removed what others have left


class TemporaryFolder:
    """A new folder that only this user can read. Owns it: it goes with the object, or with this process."""

    def __init__(self) -> None:
        """Raises OSError where none can be made."""
        directory = tempfile.gettempdir()
        if (os.getpid(), directory) not in _tidied:
            _tidied.add((os.getpid(), directory))
            _remove_abandoned(Path(directory))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        descriptor = os.open(self.path, _FLAGS)
        with ignored(OSError):  # a file system without locks: there nobody takes it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._remove = weakref.finalize(self, _remove_own, self.path, descriptor, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._remove()


def _remove_own(path: Path, descriptor: int, process: int) -> None:
    """Remove a folder, unless this is a forked child: then it is the parent's."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(f"{_PREFIX}*"):
        with ignored(OSError):  # another's, in use, or removed meanwhile
            descriptor = os.open(path, _FLAGS)
            try:
                status = os.fstat(descriptor)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _NEW_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
