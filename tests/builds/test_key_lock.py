"""A lock that one process at a time holds."""

from __future__ import annotations

import os
from pathlib import Path

from torch_hybrid_backend.builds.key_lock import KeyLock


def test_one_has_it(tmp_path: Path) -> None:
    """The lock is free after its release, and leaves no file. Other paths have other locks."""
    path = tmp_path / "engines" / "key" / ".lock"
    first = KeyLock.try_acquire(path)
    assert first is not None
    assert KeyLock.try_acquire(path) is None
    other = KeyLock.try_acquire(path.parent.parent / "other" / ".lock")
    assert other is not None
    first.release()
    first.release()
    assert not path.parent.exists()
    second = KeyLock.try_acquire(path)
    assert second is not None
    (path.parent / "entry").touch()
    second.release()
    other.release()
    assert [found.name for found in path.parent.iterdir()] == ["entry"]


def test_a_file_that_was_removed_locks_nobody_out(tmp_path: Path) -> None:
    """A process that opened the file of a released lock gets the lock of the current file, or none."""
    path = tmp_path / "engines" / "key" / ".lock"
    first = KeyLock.try_acquire(path)
    assert first is not None
    path.unlink()  # as by somebody who clears the directory
    second = KeyLock.try_acquire(path)
    assert second is not None
    assert KeyLock.try_acquire(path) is None
    first.release()
    assert KeyLock.try_acquire(path) is None  # `second` still holds the lock
    second.release()
    assert not path.exists()


def test_a_forked_child_has_not_got_it(tmp_path: Path) -> None:
    """A forked child can neither release its parent's lock nor keep it."""
    path = tmp_path / "engines" / "key" / ".lock"
    lock = KeyLock.try_acquire(path)
    assert lock is not None
    go_on, tell = os.pipe()
    child = os.fork()
    if child == 0:
        lock.release()
        os.read(go_on, 1)
        os._exit(0 if path.exists() else 1)
    assert KeyLock.try_acquire(path) is None
    os.write(tell, b"\0")
    assert os.waitpid(child, 0)[1] == 0
    lock.release()
    again = KeyLock.try_acquire(path)
    assert again is not None
    again.release()


def test_where_there_are_no_locks(tmp_path: Path) -> None:
    """Each process builds for itself if the directory cannot be written."""
    (tmp_path / "engines").write_text("in the way")
    for _ in range(2):
        lock = KeyLock.try_acquire(tmp_path / "engines" / "key" / ".lock")
        assert lock is not None
        lock.release()
