"""Path of the Python for child processes: `sys.executable`, or another Python like this one if a program that embeds Python, such as a server,
has its own path there or none.
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

# Programs of other names are never run.
_NAME = re.compile(r"(python|pypy)[\d.]*[a-z]?(-dbg)?")
_PROBE = "import sys; print(sys.implementation.cache_tag, sys.abiflags, sys.maxsize)"
_EXPECTED = f"{sys.implementation.cache_tag} {sys.abiflags} {sys.maxsize}"
_PROBE_TIMEOUT_S = 60.0
NO_INTERPRETER = (
    f"there is no Python {'.'.join(map(str, sys.version_info[:2]))} to start: sys.executable is {sys.executable!r} (a program that embeds "
    "Python can set the path by multiprocessing.set_executable)"
)
_NOT_RUNNABLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


@functools.cache
def interpreter() -> str | None:
    """The path of a Python of this version and build; None if there is none. Raises OSError if no process can be started to find it."""
    return next(filter(_is_like_this_one, dict.fromkeys(_candidates())), None)


def _candidates() -> Iterator[str]:
    # The path given to `multiprocessing.set_executable`, else sys.executable.
    spawned = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    executables = [sys.executable or "", spawned, getattr(sys, "_base_executable", None) or ""]
    # A frozen program, made by PyInstaller for example, is no interpreter, whatever its name.
    is_frozen = getattr(sys, "frozen", False)
    yield from (path for path in executables if path and not (is_frozen and path == sys.executable))
    for prefix in (sys.exec_prefix, sys.prefix, sys.base_exec_prefix, sys.base_prefix):
        for name in ("python{}.{}".format(*sys.version_info), "python{}".format(*sys.version_info), "python"):
            yield str(Path(prefix, "bin", name))


def _is_like_this_one(path: str) -> bool:
    """True if the program is a Python of this version and build: it is the running file, or says so when it is run."""
    if not _NAME.fullmatch(Path(path).name):
        return False
    try:
        if os.path.samefile(path, "/proc/self/exe"):
            return True
    except failures(OSError):  # the file does not exist, or the system has no /proc/self/exe
        pass
    try:
        command = [path, "-I", "-S", "-c", _PROBE]
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        if error.errno in _NOT_RUNNABLE:
            return False
        raise
    return probe.stdout.strip() == _EXPECTED
