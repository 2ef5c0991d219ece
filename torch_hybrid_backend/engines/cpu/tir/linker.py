"""Linking a kernel's object file to a shared library, which needs nothing but the C library and its mathematics.

The library's file ends with the object file itself, behind what loaders read: `link_together` makes one library of many kernels' objects.

`ld` needs 2 ms for a kernel that calls nothing, 8 ms with the C library's symbols, and a C++ compiler driver 15 ms (2-core Zen 5, GNU
binutils): kernels have no constructors, so the start-up files that a driver adds serve nothing. The driver, which also brings the compiler's
own runtime library, stays the last choice.

Kernels for another architecture are linked by Zig's driver, which has a linker and stubs of glibc for every one, or by a cross compiler.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_hybrid_backend.engines.cpu.isa import ARCHITECTURES
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.errors import CompileError

# The oldest glibc that libraries for another architecture run with: that of the wheel.
_GLIBC = "2.28"
_DRIVERS = ("cc", "gcc", "clang", "c++", "g++")
LINKERS = _DRIVERS if sys.platform == "darwin" else ("ld", *_DRIVERS)


def find_linker() -> str | None:
    """The path of the program that `link` calls first; None where there is none."""
    return next(filter(None, map(shutil.which, LINKERS)), None)


def lacking_linker(target: Target) -> str:
    """A sentence that says what to install to link kernels for a foreign target; "" where there is a linker, and for other targets."""
    if not target.is_foreign or _cross_drivers(target):
        return ""
    return (
        f"no linker for {target.architecture} was found: `pip install ziglang`, or put {ARCHITECTURES[target.architecture].triple}-gcc on the "
        f"PATH (Debian: apt-get install gcc-{target.architecture}-linux-gnu)"
    )


def _cross_drivers(target: Target) -> list[list[str]]:
    """The beginnings of command lines that compile and link for a foreign target, best first."""
    triple = ARCHITECTURES[target.architecture].triple
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{triple}.{_GLIBC}"]
    gcc = shutil.which(f"{triple}-gcc")
    return [*([zig] if importlib.util.find_spec("ziglang") else []), *([[gcc]] if gcc else [])]


# The end of a library's file: the size of the object file before it, and what tells that there is one.
_TRAILER = struct.Struct("<Q8s")
_MARK = b"object\r\n"


def link(object_file: Path, library: Path, carried: Path | None = None) -> None:
    """Make `library` from `object_file`, and append the object file `carried` to it: that of a foreign target, by default the same one.

    Raises CompileError where there is no linker, naming what to install, or where none succeeds; also where a symbol stays undefined: such
    a library could not be loaded.
    """
    _link(_commands([object_file], library))
    content = (carried or object_file).read_bytes()
    with library.open("ab") as file:
        file.write(content + _TRAILER.pack(len(content), _MARK))


def object_of(library: bytes) -> bytes | None:
    """The object file that a library's file ends with; None where `link` did not make it."""
    if len(library) < _TRAILER.size:
        return None
    size, mark = _TRAILER.unpack(library[-_TRAILER.size :])
    end = len(library) - _TRAILER.size
    return library[end - size : end] if mark == _MARK and size <= end else None


def link_together(objects: Sequence[Path], library: Path, target: Target) -> None:
    """Make one library of object files of several kernels for `target`; equal files give equal bytes. Raises CompileError as `link` does."""
    if not target.is_foreign:
        commands = _commands(objects, library, "-s")
    elif lacking := lacking_linker(target):
        raise CompileError(lacking, recurs=False)
    else:
        files = ["-shared", "-s", "-Wl,-z,noexecstack,--no-undefined", "-o", str(library), *map(str, objects), "-lm"]
        commands = [[*driver, *files] for driver in _cross_drivers(target)]
    _link(commands)


def _link(commands: Sequence[Sequence[str]]) -> None:
    failures = []
    for command in commands:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
        failures.append(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")
    if not failures:
        raise CompileError(NO_LINKER, recurs=False)
    raise CompileError("kernels cannot be linked:\n" + "\n".join(failures), recurs=False)


def _commands(objects: Sequence[Path], library: Path, *options: str) -> list[list[str]]:
    """Command lines to try, best first; only programs that are on the PATH."""
    commands = []
    drivers = [found for name in _DRIVERS if (found := shutil.which(name))][:1]
    if sys.platform == "darwin":
        for driver in drivers:
            commands.append([driver, "-dynamiclib", "-o", str(library), *map(str, objects)])
        return commands
    files = [*options, "-o", str(library), *map(str, objects)]
    if linker := shutil.which("ld"):
        # Most kernels call nothing. Others call memset, say, or what the compiler's own library must provide: the driver names that too.
        flags = ("-shared", "-z", "noexecstack", "--no-undefined", "--as-needed")
        commands.append([linker, *flags, *files])
        commands.append([linker, *flags, *files, "-l:libm.so.6", "-l:libc.so.6"])
    for driver in drivers:
        commands.append([driver, "-shared", "-Wl,-z,noexecstack,--no-undefined", *files, "-lm"])
    return commands


INSTALL = (
    "xcode-select --install"
    if sys.platform == "darwin"
    else "install binutils (apt-get install binutils, dnf install binutils, or conda install -c conda-forge binutils)"
)
NO_LINKER = (
    f"no linker is on the PATH (none of {', '.join(LINKERS)}): the TVM engine needs one to make libraries of the kernels that it compiles; "
    f"{INSTALL}"
)
