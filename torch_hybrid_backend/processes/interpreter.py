"""The Python that child processes run: `sys.executable`, unless a program that is no Python itself, such as a server, tells its own path there,
or none.
"""

from __future__ import annotations

import errno
import functools
import multiprocessing.spawn
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch_hybrid_backend.errors import failures

# Nothing else is ever started to see what it is.
_NAME = re.compile(r"(python|pypy)[\d.]*[a-z]?(-dbg)?")
_ASKED = "import sys; print(sys.implementation.cache_tag, sys.abiflags, sys.maxsize)"
_ANSWER = f"{sys.implementation.cache_tag} {sys.abiflags} {sys.maxsize}"
_PATIENCE_S = 60.0
NO_INTERPRETER = (
    f"no Python {'.'.join(map(str, sys.version_info[:2]))} is found to start: sys.executable is {sys.executable!r} (a program that embeds "
    "Python can tell which one to start by multiprocessing.set_executable)"
)
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


@functools.cache
def interpreter() -> str | None:
    """The path of a Python like the one that runs here; None where there is none. Raises OSError where it cannot be told now, as no process can
    be started."""
    return next(filter(_is_like_this_one, dict.fromkeys(_candidates())), None)


def _candidates() -> Iterator[str]:
    spawned = os.fsdecode(
        multiprocessing.spawn.get_executable() or ""
    )  # what `multiprocessing.set_executable` was given, else sys.executable
    executables = [sys.executable or "", spawned, getattr(sys, "_base_executable", None) or ""]
    # A program that was made by PyInstaller, say, is no interpreter, whatever it is called.
    is_frozen = getattr(sys, "frozen", False)
    yield from (path for path in executables if path and not (is_frozen and path == sys.executable))
    for prefix in (sys.exec_prefix, sys.prefix, sys.base_exec_prefix, sys.base_prefix):
        for name in ("python{}.{}".format(*sys.version_info), "python{}".format(*sys.version_info), "python"):
            yield str(Path(prefix, "bin", name))


def _is_like_this_one(path: str) -> bool:
    """True if the program is a Python of this version and build: found out by its file where that runs here, else by running it."""
    if not _NAME.fullmatch(Path(path).name):
        return False
    try:
        if os.path.samefile(path, "/proc/self/exe"):
            return True
    except failures(OSError):  # it does not exist, or the system has no such name for what runs
        pass
    try:
        command = [path, "-I", "-S", "-c", _ASKED]
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        if error.errno in _NO_PROGRAM:
            return False
        raise
    return probe.stdout.strip() == _ANSWER
