"""On-disk store of bytes under (kind, key), shared by the processes of one user, or filled by root for all users.

A utility that any room may import (it imports errors and utilities). Partition keeps placement verdicts in it, engines keep
kernel libraries. Entries are read back as bytes or as a file path, never unpickled.

Layout: `<root>/<kind>/<key>/<checksum of kind, key and content><suffix>`. As the name is the checksum, an entry is one file. The file is
written under a temporary name and moved into place by `os.replace`. Readers see the whole entry or none, and two processes that write different
bytes under one key do not disturb each other. An entry that was moved to another key counts as corrupt.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from torch_hybrid_backend.errors import CacheError, failures, ignored
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_log = logging.getLogger(__name__)
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SUFFIX = re.compile(r"\.[a-z]{1,16}")
# Only files with such names are counted or removed, as the directory may also hold other files.
_ENTRY = re.compile(r"[0-9a-f]{64}\.[a-z]+")
_UNFINISHED = (".hybrid-", ".part")

# Not through a link, and not stopping at a pipe. Windows has no such flags.
_OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_ELSEWHERE = "HYBRID_CACHE_DIR sets another directory"
# The store's size is checked again after 1 / _UNCHECKED_SHARE of the limit was written, as a check walks all files.
_UNCHECKED_SHARE = 16
_IN_USE_S = 600.0  # an entry that was used this recently may be about to be opened, and stays
_ABANDONED_S = 3600.0  # a temporary file of this age has no writer any more


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk space of one kind of entries."""

    kind: str
    entries: int
    size_bytes: int


# The kind of remembered failures, which are those of one machine on one day.
FAILURES = "failed-builds"


@dataclass(frozen=True, slots=True)
class Content:
    """An entry away from its store."""

    kind: str
    key: str
    suffix: str
    data: bytes

    @property
    def is_portable(self) -> bool:
        """True if the entry is of use to other processes and machines."""
        return self.kind != FAILURES


class Behind(Protocol):
    """A place where entries are looked for that a store does not have."""

    def get(self, kind: str, key: str) -> Content | None:
        """The entry, verified, or None."""
        ...

    def forget(self, kind: str, key: str) -> None:
        """Let the entry be a miss from now on."""
        ...


# Gets each entry that is found or written.
Listener = Callable[[Content], None]
_listeners: list[Listener] = []
_collecting: list[Listener] = []  # those of them that want what is in memory, too


def tell(listener: Listener) -> None:
    """Call a function with each entry that any store of this process finds or writes from now on, in the thread that does so."""
    _listeners.append(listener)


@contextlib.contextmanager
def collecting(into: dict[tuple[str, str], Content]) -> Iterator[None]:
    """Collect the entries that any thread finds or writes within the context, by kind and key. Others that remember entries in memory look them
    up again within it (`is_collecting`)."""

    def collect(content: Content) -> None:
        into[content.kind, content.key] = content

    _listeners.append(collect)
    _collecting.append(collect)
    try:
        yield
    finally:
        _listeners.remove(collect)
        _collecting.remove(collect)


def is_collecting() -> bool:
    """True within a context of `collecting`, in any thread."""
    return bool(_collecting)


class Store:
    """Bytes on disk, checked when read. Owns a temporary directory where the wanted one cannot be used."""

    def __init__(self, root: Path, limit_bytes: int | None = None, behind: Behind | None = None) -> None:
        """Open `root`, and create it with mode 0700 if it is absent. `limit_bytes`: beyond it the least recently used entries are removed.
        `behind`: where entries are looked for that are absent; what is found is written to `root`. A directory that cannot be written, as in a
        container's image, is only read: `put` raises.

        Raises CacheError if the directory cannot be created or read, belongs neither to this user nor to root, is writable for others, or lies
        in a directory in which others may replace it. Kernel libraries from the store are loaded into the process, so no other user may place
        one.
        """
        self._only_read = ""  # the reason why nothing can be written
        try:
            _make(root)
            # Links are followed once, here: one that is changed later leads nobody elsewhere.
            root = root.resolve(strict=True)
            check_privacy(root)
            try:
                with tempfile.TemporaryFile(dir=root):
                    pass
            except failures(OSError) as error:
                self._only_read = _cannot_write(root, error)
                _check_readable(root)
        except CacheError:
            raise
        except failures(OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise CacheError(_cannot_write(root, error)) from error
        self.root = root
        self.limit_bytes = limit_bytes
        self._behind = behind
        self._unchecked_bytes: int | None = None  # written since the size was looked at; None: never was
        self._owned: TemporaryFolder | None = None  # which goes with it
        self._hidden: set[Path] = set()  # entries that were to be removed, and could not be

    @property
    def is_read_only(self) -> bool:
        """True if nothing can be written to it."""
        return bool(self._only_read)

    @staticmethod
    def open(
        root: Path,
        *,
        enabled: bool = True,
        strict: bool = False,
        limit_bytes: int | None = None,
        behind: Behind | None = None,
    ) -> Store:
        """The store at `root`; a temporary one, gone with the process, where `enabled` is false or `root` cannot be
        used.

        The latter gives one WARNING, or under `strict` raises CacheError.
        """
        if enabled:
            try:
                return Store(root, limit_bytes, behind)
            except CacheError as error:
                if strict:
                    raise
                _log.warning("%s. This process keeps compiled kernels in a temporary directory", error)
        return Store.temporary()

    @staticmethod
    def temporary() -> Store:
        """A store in a new directory, which is removed with the store or at the end of this process. Raises CacheError if that fails."""
        try:
            folder = TemporaryFolder()
        except failures(OSError) as error:
            raise CacheError(f"no temporary directory can be made: {error}. TMPDIR sets another place") from error
        store = Store(folder.path)
        store._owned = folder
        return store

    def get(self, kind: str, key: str) -> bytes | None:
        """The bytes under (kind, key), or None. An entry whose checksum is wrong is removed and counts as absent."""
        found = self._read(kind, key) or self._from_behind(kind, key)
        return found[1] if found else None

    def path_of(self, kind: str, key: str) -> Path | None:
        """The path of the entry's file (a kernel library, say), after its checksum was verified; None if the entry is absent."""
        found = self._read(kind, key) or self._from_behind(kind, key)
        return found[0] if found else None

    def put(self, kind: str, key: str, data: bytes, suffix: str = ".bin") -> Path:
        """Write the entry atomically; returns its path, which ends in `suffix`. Raises CacheError on failure."""
        if self._only_read:
            raise CacheError(self._only_read)
        if not is_suffix(suffix):
            raise CacheError(f"{suffix!r} cannot end the name of a cache entry; it must be a dot and 1 to 16 of a-z")
        folder = self._folder(kind, key)
        target = folder / (checksum(kind, key, data) + suffix)
        self._make_room(len(data))
        try:
            try:
                _write(target, data)
            except FileNotFoundError:  # another process has just removed the empty folder, or the user everything
                _make(self.root)
                _write(target, data)
        except failures(OSError) as error:
            raise CacheError(f"cannot write {target}: {error}") from error
        self._hidden.discard(target)
        _told(Content(kind, key, suffix, data))
        return target

    def add(self, content: Content) -> bool:
        """Write an entry that was made elsewhere, unless there is one under its key, or it is of no use here; return True if it was written.
        Raises CacheError as `put` does."""
        if not content.is_portable or any(
            path not in self._hidden for path in _files(self._folder(content.kind, content.key))
        ):
            return False
        self.put(content.kind, content.key, content.data, content.suffix)
        return True

    def remove(self, kind: str, key: str) -> None:
        """Remove the entry, if present. If the store cannot be written, the entry is hidden from this process only. So is one that lies behind
        the store."""
        if self._behind is not None:
            self._behind.forget(kind, key)
        for path in _files(self._folder(kind, key)):
            self._discard(path)

    def lock_path(self, kind: str, key: str) -> Path:
        """Path of the entry's lock file, whose name is no name of an entry. Raises CacheError for an illegal kind or key."""
        return self._folder(kind, key) / ".lock"

    def keys(self, kind: str) -> list[str]:
        """The keys of the entries of one kind, in order."""
        return sorted({path.parent.name for path, _ in self._entries() if path.parent.parent.name == kind})

    def usage(self) -> list[Usage]:
        """Disk space of each kind of entries, by name."""
        sizes: dict[str, list[int]] = {}
        for path, status in self._entries():
            sizes.setdefault(path.parent.parent.name, []).append(_disk_bytes(status))
        return [Usage(kind, len(sizes[kind]), sum(sizes[kind])) for kind in sorted(sizes)]

    def clear(self) -> None:
        """Remove every entry. Processes that use the store go on: what they lack they make again. Raises CacheError for what cannot be
        removed."""
        for path, _ in self._entries():
            try:
                path.unlink(missing_ok=True)
            except failures(OSError) as error:
                raise CacheError(f"cannot remove {path}: {error}") from error
            _remove_empty(path.parent)

    def _discard(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except failures(OSError):
            self._hidden.add(path)

    def contents(self) -> Iterator[Content]:
        """Iterate over the entries that are of use to other processes and machines."""
        for usage in self.usage():
            for key in self.keys(usage.kind):
                found = self._read(usage.kind, key)
                content = None if found is None else Content(usage.kind, key, found[0].suffix, found[1])
                if content is not None and content.is_portable:
                    yield content

    def _from_behind(self, kind: str, key: str) -> tuple[Path | None, bytes] | None:
        """The entry that lies behind the store, and its path here, unless it cannot be written."""
        if self._behind is None or kind == FAILURES:
            return None
        content = self._behind.get(kind, key)
        if content is None:
            return None
        try:
            return self.put(kind, key, content.data, content.suffix), content.data
        except CacheError as error:
            _log.info("an entry of a shared cache is not kept: %s", error)
            return None, content.data

    def _read(self, kind: str, key: str) -> tuple[Path, bytes] | None:
        for path in _files(self._folder(kind, key)):
            if path in self._hidden:
                continue
            try:
                data = read_entry(path)
            except CacheError as error:
                if path.is_symlink() or path.exists():
                    _log.warning("%s; it is removed and made anew", error)
                    self._discard(path)
                continue
            with ignored(OSError):
                os.utime(path)  # used now: `_make_room` removes the least recently used first
            _told(Content(kind, key, path.suffix, data))
            return path, data
        return None

    def _folder(self, kind: str, key: str) -> Path:
        for name in (kind, key):
            if not is_name(name):
                raise CacheError(f"{name!r} cannot name a cache entry; it must be 1 to 200 of a-z A-Z 0-9 . _ -")
        return self.root / kind / key

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """All files of the store, unfinished ones included."""
        found = []
        for path in self.root.glob("*/*/*"):
            if not (_ENTRY.fullmatch(path.name) or _is_unfinished(path)):
                continue
            with ignored(OSError):  # removed meanwhile
                found.append((path, path.lstat()))
        return found

    def _make_room(self, more_bytes: int) -> None:
        """Remove entries beyond the limit. The check is approximate: it walks the files now and then, and entries in use stay."""
        if self.limit_bytes is None:
            return
        if (
            self._unchecked_bytes is not None
            and self._unchecked_bytes + more_bytes < self.limit_bytes // _UNCHECKED_SHARE
        ):
            self._unchecked_bytes += more_bytes
            return
        self._unchecked_bytes = more_bytes
        now = time.time()
        kept = []
        for path, status in self._entries():
            age = now - status.st_mtime
            if _is_unfinished(path) and age > _ABANDONED_S:
                _unlink(path)
            else:
                kept.append((status.st_mtime, _disk_bytes(status), path))
        excess = sum(size for _, size, _ in kept) - self.limit_bytes
        if excess <= 0:
            return
        excess += self.limit_bytes // _UNCHECKED_SHARE
        removed = 0
        for used, size, path in sorted(kept):
            if excess <= 0 or now - used < _IN_USE_S:
                break
            _unlink(path)
            removed += 1
            excess -= size
        _log.info(
            "the cache %s was over its limit of %d MiB: %d entries removed", self.root, self.limit_bytes >> 20, removed
        )


def _told(content: Content) -> None:
    for listener in tuple(_listeners):
        listener(content)


def is_entry(path: Path) -> bool:
    """True if the file has the name of a store's entry, so that `read_entry` can verify it."""
    return _ENTRY.fullmatch(path.name) is not None and len(path.parts) > 2


def is_name(text: str) -> bool:
    """True if a text can be the kind or the key of an entry."""
    return _SAFE.fullmatch(text) is not None


def is_suffix(text: str) -> bool:
    """True if a text can end the name of an entry's file."""
    return _SUFFIX.fullmatch(text) is not None


def open_entry(path: Path) -> BinaryIO:
    """Open a file to read it, but through no link, and without waiting at a pipe. Raises OSError."""
    return os.fdopen(os.open(path, _OPEN_FLAGS), "rb")


def read_entry(path: Path) -> bytes:
    """The content of a store's entry, as verified: what is returned is what was checked, whatever happens to the file.

    Raises CacheError where the file is gone, is not a plain file of this user or of root that nobody else may write, or its checksum is wrong.
    """
    try:
        with open_entry(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not is_private(status):
                raise CacheError(
                    f"the cache entry {path} is not a plain file of this user or of root that nobody else may write "
                    f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})"
                )
            data = file.read()
    except failures(OSError) as error:
        raise CacheError(f"the cache entry {path} cannot be read: {error}") from error
    if checksum(path.parent.parent.name, path.parent.name, data) != path.name[:64]:
        raise CacheError(f"the cache entry {path} is corrupt (its checksum differs)")
    return data


def checksum(kind: str, key: str, data: bytes) -> str:
    """SHA-256 of an entry, in hexadecimal."""
    return hashlib.sha256(f"{kind}\x00{key}\x00".encode() + data).hexdigest()


def _make(root: Path) -> None:
    """Make the directory and those above it that are absent, all private whatever the umask."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def _cannot_write(root: Path, error: Exception) -> str:
    return f"the cache directory {root} cannot be made or written ({error}). {_ELSEWHERE}"


def _check_readable(root: Path) -> None:
    """Raise CacheError where the directory or that of one of its kinds cannot be read: those who fill a cache keep it to themselves."""
    try:
        for folder in root.iterdir():
            if folder.is_dir():
                next(folder.iterdir(), None)
    except PermissionError as error:
        raise CacheError(
            f"the cache directory {root} cannot be read by user {os.geteuid()} ({error}). Let others read what it holds "
            f"(chmod -R a+rX {root}). {_ELSEWHERE}"
        ) from error


def check_privacy(root: Path) -> None:
    """Raise CacheError unless the directory is this user's or root's, and no other user can write or replace it."""
    status = root.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache directory {root} is not a directory. {_ELSEWHERE}")
    if not hasattr(os, "geteuid"):
        return
    if not _is_trusted(status):
        raise CacheError(
            f"the cache directory {root} belongs to user {status.st_uid}, and user {os.geteuid()} runs this process. "
            f"{_ELSEWHERE}"
        )
    if _others_may_write(status):
        raise CacheError(
            f"the cache directory {root} is writable for others (mode {stat.S_IMODE(status.st_mode):04o}). "
            f"Make it private (chmod 700 {root}). {_ELSEWHERE}"
        )
    for folder in root.parents:
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # sticky, as /tmp is: only its owner may replace an item
            raise CacheError(
                f"the cache directory {root} lies in {folder}, where anybody may replace it (mode {stat.S_IMODE(mode):04o}). "
                f"Change that (chmod o-w {folder}). {_ELSEWHERE}"
            )


def is_private(status: os.stat_result) -> bool:
    """True if a file or folder is this user's or root's, and no other's to write. Always so on Windows, which tells no owner."""
    return not hasattr(os, "geteuid") or (_is_trusted(status) and not _others_may_write(status))


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)  # root may do anything to this process as it is


def _others_may_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _write(target: Path, data: bytes) -> None:
    folder = target.parent
    for directory in (folder.parent, folder):  # one by one: mkdir gives `mode` to the last one only
        directory.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=_UNFINISHED[0], suffix=_UNFINISHED[1])
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:  # Ctrl-C too
        Path(temporary).unlink(missing_ok=True)
        raise


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except failures(OSError):
        return []


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(_UNFINISHED[0]) and path.name.endswith(_UNFINISHED[1])


def _disk_bytes(status: os.stat_result) -> int:
    return max(status.st_size, getattr(status, "st_blocks", 0) * 512)


def _unlink(path: Path) -> None:
    with ignored(OSError):
        path.unlink()
    _remove_empty(path.parent)


def _remove_empty(folder: Path) -> None:
    with ignored(OSError):  # not empty, or gone
        folder.rmdir()
