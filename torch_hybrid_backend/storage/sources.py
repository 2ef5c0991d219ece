"""Versions of this package's own sources: what the cache keeps under one is not found by code that has been edited since.

Whoever keeps something names the parts of the package that decide it. Rooms rather than modules: their import rules
(`ARCHITECTURE.md`) say what a room can depend on, also where it imports by name, and hashing three of them takes 2 ms.
Utilities that move bytes about, and decide nothing of them, are left out: an edit there would cost every kernel.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from torch_hybrid_backend._version import __version__

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def sources_version(*parts: str, package: Path | None = None) -> str:
    """SHA-256 (64 hexadecimal digits) of parts of the package, or of the one in a folder, as they were when this process first asked.

    parts: folders, all Python files below them, or single files, relative to the package, with forward slashes. One that is not
    there counts for nothing, as in a zip file; this package's version counts always.

    Ask when the sources are imported: an editor that changes them later changes nothing in this process.
    """
    return read_sources_version(*parts, package=package)


def read_sources_version(*parts: str, package: Path | None = None) -> str:
    """The same of the files as they are now. Raises OSError where one cannot be read."""
    digest = hashlib.sha256(__version__.encode())
    package = package or _PACKAGE
    for part in parts:
        root = package / part
        for path in sorted(root.rglob("*.py")) if root.is_dir() else filter(Path.is_file, [root]):
            digest.update(f"{path.relative_to(package).as_posix()}\x00".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
