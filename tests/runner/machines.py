"""Machines that QEMU emulates, with the runner that `make runner TARGET=...` builds for them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_hybrid_backend import __version__

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """A target of `make runner`, and the command that runs its programs. `glibc`: the newest that they may need. `debian`: Debian's name of the
    architecture, whose C library lies in a folder of its own; "" for this machine's."""

    target: str
    emulator: tuple[str, ...]
    glibc: tuple[int, int]
    debian: str = ""

    @property
    def folder(self) -> Path:
        """Folder that `make runner` has installed to."""
        return ROOT / f"build/runner/hybrid-runner-{__version__}-{self.target}"

    @property
    def processor(self) -> str:
        return self.target.partition("-")[0]

    def runs(self, *command: object, emulator: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine; `emulator`: more arguments of the emulator."""
        whole = [*self.emulator, *emulator, *map(str, command)]
        return subprocess.run(whole, capture_output=True, text=True, timeout=500, check=False)


def _root(processor: str) -> Path:
    """Folder of glibc and libgomp, as Debian has them for cross compilation."""
    return Path(f"/usr/{processor}-linux-gnu")


def _foreign(processor: str, debian: str) -> Machine:
    root = _root(processor)
    emulator = (f"qemu-{processor}", "-L", str(root), "-E", f"LD_LIBRARY_PATH={root}/lib")
    return Machine(f"{processor}-linux-gnu.2.28", emulator, (2, 28), debian)


ARM, RISCV = _foreign("aarch64", "arm64"), _foreign("riscv64", "riscv64")
X86 = Machine("x86_64-linux-gnu.2.28", ("qemu-x86_64",), (2, 28))


def needed(machine: Machine) -> Machine:
    """The machine; skips where something to build for it and to emulate it is missing."""
    if not machine.folder.exists():
        pytest.skip(f"run `make runner TARGET={machine.target}`, as `make test-full` does")
    if shutil.which(machine.emulator[0]) is None:
        pytest.skip(f"needs {machine.emulator[0]}: apt-get install qemu-user")
    if machine.debian and not (_root(machine.processor) / "lib/libgomp.so.1").exists():
        names = " ".join(f"{library}-{machine.debian}-cross" for library in ("libc6", "libgomp1"))
        pytest.skip(f"needs glibc and libgomp for {machine.processor}: apt-get install {names}")
    return machine
