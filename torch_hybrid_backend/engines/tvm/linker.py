"""Linking a kernel's object file to a shared library.

`ld` alone needs 4 ms for it, a C++ compiler driver 15 ms (2-core Zen 5, GNU binutils): kernels have no constructors, so the start-up
files that a driver adds serve nothing. The driver, which also brings the compiler's own runtime library, stays the second choice.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from torch_hybrid_backend.errors import CompileError

_DRIVERS = ("cc", "gcc", "clang", "c++", "g++")
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`'\"]?([\w.$@]+)")
# Provided by the process that loads the library.
_PROVIDED_PREFIXES = ("TVMFFI", "TVMBackend", "__TVM")


def link(object_file: Path, library: Path) -> None:
    """Make `library` from `object_file`.

    Raises CompileError where there is no linker, naming what to install, or where none succeeds.
    """
    failures = []
    for command in _commands(object_file, library):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        missing = [name for name in _UNDEFINED.findall(done.stderr) if not name.startswith(_PROVIDED_PREFIXES)]
        if done.returncode == 0 and not missing:
            return
        why = (
            f"leaves {', '.join(sorted(set(missing)))} undefined"
            if missing
            else f"exit status {done.returncode}: {done.stderr.strip()}"
        )
        failures.append(f"{' '.join(command)}: {why}")
    if not failures:
        raise CompileError(_NO_LINKER)
    raise CompileError("a kernel cannot be linked:\n" + "\n".join(failures))


def _commands(object_file: Path, library: Path) -> list[list[str]]:
    """Command lines to try, best first; only programs that are on the PATH."""
    commands = []
    drivers = [found for name in _DRIVERS if (found := shutil.which(name))][:1]
    if sys.platform == "darwin":
        for driver in drivers:
            commands.append(
                [driver, "-dynamiclib", "-undefined", "dynamic_lookup", "-o", str(library), str(object_file)]
            )
        return commands
    options = ["-shared", "-z", "noexecstack", "-o", str(library), str(object_file)]
    if linker := shutil.which("ld"):
        # The unresolved are warned of, so that one which the compiler's runtime library would provide is noticed.
        commands.append(
            [linker, "--no-undefined", "--warn-unresolved-symbols", "--as-needed", *options, "-l:libm.so.6"]
        )
    for driver in drivers:
        commands.append([driver, *("-Wl," + ",".join(options[1:3]), options[0]), *options[3:], "-lm"])
    return commands


_NO_LINKER = (
    f"no linker: none of {', '.join(('ld', *_DRIVERS) if sys.platform != 'darwin' else _DRIVERS)} is on the PATH. The TVM engine compiles "
    "kernels itself but needs the system's linker to make libraries of them. Install one ("
    + (
        "xcode-select --install"
        if sys.platform == "darwin"
        else "apt-get install binutils, dnf install binutils, or conda install -c conda-forge binutils"
    )
    + "), or leave the engine out with HYBRID_DISABLE_ENGINES=tvm"
)
