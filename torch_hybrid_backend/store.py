"""The on-disk store: bytes under (kind, key), shared by the processes of one user.

A utility that any room may import (it imports errors only): partition keeps placement verdicts in it, engines keep
kernel libraries. What it holds is read back as bytes or as a file path, never unpickled.

Layout: `<root>/<kind>/<key>/<SHA-256 of the content><suffix>`. The name is the checksum, so an entry is one file,
written to a temporary name and moved into place by `os.replace`: readers see all of it or nothing, and two processes
that write different bytes under one key do not disturb each other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
from pathlib import Path

from torch_hybrid_backend.errors import CacheError

_log = logging.getLogger(__name__)
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")

_ELSEWHERE = "HYBRID_CACHE_DIR sets another directory"


class Store:
    """Bytes on disk, checked when read. Owns a temporary directory where the wanted one cannot be used."""

    def __init__(self, root: Path) -> None:
        """Open `root`, made with mode 0700 where absent.

        Raises CacheError where it cannot be made or written, is not owned by this user, or is writable for others:
        kernel libraries found there are loaded into the process, so nobody else may place one.
        """
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.stat()
        except OSError as error:
            raise CacheError(f"the cache directory {root} cannot be made ({error}). {_ELSEWHERE}") from error
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise CacheError(
                f"the cache directory {root} belongs to user {status.st_uid}, and user {os.getuid()} runs this process. "
                f"{_ELSEWHERE}"
            )
        if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError(
                f"the cache directory {root} is writable for others (mode {stat.S_IMODE(status.st_mode):04o}). "
                f"Make it private (chmod 700 {root}). {_ELSEWHERE}"
            )
        try:
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise CacheError(f"the cache directory {root} cannot be written ({error}). {_ELSEWHERE}") from error

    @staticmethod
    def open(root: Path, *, enabled: bool = True, strict: bool = False) -> Store:
        """The store at `root`; a temporary one, gone with the process, where `enabled` is false or `root` cannot be
        used.

        The latter gives one WARNING, or under `strict` raises CacheError.
        """
        if enabled:
            try:
                return Store(root)
            except CacheError as error:
                if strict:
                    raise
                _log.warning("%s. This process keeps compiled kernels in a temporary directory", error)
        temporary = tempfile.TemporaryDirectory(prefix="torch_hybrid_backend-")
        store = Store(Path(temporary.name))
        store._temporary = temporary
        return store

    def get(self, kind: str, key: str) -> bytes | None:
        """The bytes under (kind, key), or None. An entry whose checksum is wrong is removed and counts as absent."""
        found = self._read(kind, key)
        return found[1] if found else None

    def path_of(self, kind: str, key: str) -> Path | None:
        """The file that holds the entry (a kernel library, say), its checksum verified just now; None where absent."""
        found = self._read(kind, key)
        return found[0] if found else None

    def put(self, kind: str, key: str, data: bytes, suffix: str = "") -> Path:
        """Write the entry atomically; returns its path, which ends in `suffix`. Raises CacheError on failure."""
        folder = self._folder(kind, key)
        target = folder / (hashlib.sha256(data).hexdigest() + suffix)
        try:
            for directory in (folder.parent, folder):  # one by one: mkdir gives `mode` to the last one only
                directory.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, target)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CacheError(f"cannot write {target}: {error}") from error
        return target

    def remove(self, kind: str, key: str) -> None:
        """Remove the entry, where present."""
        for path in self._files(self._folder(kind, key)):
            path.unlink(missing_ok=True)

    def _read(self, kind: str, key: str) -> tuple[Path, bytes] | None:
        for path in self._files(self._folder(kind, key)):
            try:
                data = path.read_bytes()
            except OSError:  # removed meanwhile, or unreadable: absent
                continue
            if hashlib.sha256(data).hexdigest() == path.name[:64]:
                return path, data
            _log.warning("the cache entry %s is corrupt (its checksum differs); it is removed and made anew", path)
            path.unlink(missing_ok=True)
        return None

    def _folder(self, kind: str, key: str) -> Path:
        for name in (kind, key):
            if not _SAFE.fullmatch(name):
                raise CacheError(f"{name!r} cannot name a cache entry; legal are 1 to 200 of a-z A-Z 0-9 . _ -")
        return self.root / kind / key

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        try:
            return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        except OSError:
            return []
