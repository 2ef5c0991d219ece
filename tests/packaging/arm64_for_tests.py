"""A Debian for arm64 beside PyTorch's wheels, run by QEMU: debootstrap fetches it, name spaces keep it apart from this machine.

Linux starts programs of other processors by an interpreter that is registered in binfmt_misc. From Linux 6.7 on a user name space has a
binfmt_misc of its own: the registration ends with the programs that are run in it, and this machine has none.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/arm64"  # kept: packages are gigabytes, as PyTorch's wheel for AArch64 is one for CUDA
QEMU = "qemu-aarch64-static"
_NEEDED = ("debootstrap", "dpkg-deb", "unshare", "chroot", QEMU)
_DEBIAN = ("python3", "binutils")
_PACKAGES = ("torch", "apache-tvm", "numpy", "tqdm")
_PYTHON = "3.11"  # Debian 12's
# Not QEMU's own "max", which has SVE: there, matrix products of NVIDIA's BLAS, which is eager's in that torch, are wrong (QEMU 7.2).
_PROCESSOR = "neoverse-n1"
# The header of an executable for AArch64, and which of its bits count: little-endian, 64 bits, EM_AARCH64; EXEC or DYN.
_MAGIC = "7f454c460201010000000000000000000200b700"
_MASK = "ffffffffffffff00fffffffffffffffffeffffff"
# Mounts end with the name space. The machine's /sys stays outside: libraries of PyTorch's crash where it tells of x86's processors. The shell
# stays, as process 1: a program in its place would not end by its own signals.
_INSIDE = """
set -e
root=$1 packages=$2 files=$3 qemu=$4 magic=$5
shift 5
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' ":aarch64:M::$magic:$qemu:F" > /proc/sys/fs/binfmt_misc/register
mount --bind "$packages" "$root/packages"
mount --bind "$files" "$root/files"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
chroot "$root" "$@"
"""


def lacking() -> str:
    """A sentence that says what is missing to make and run such a system, or ""."""
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install debootstrap qemu-user-static"
    if os.geteuid() != 0:
        return "needs root, as debootstrap does"
    release = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])
    return "" if release >= (6, 7) else "needs Linux 6.7: binfmt_misc in a name space of its own"


class Arm64:
    """The system. `files`: a folder that its programs see as /files."""

    def __init__(self, files: Path) -> None:
        self._files = files
        if not (FOLDER / "root").exists():
            _fetch_debian(FOLDER / "root")
        if not (FOLDER / "packages").exists():
            _fetch_packages(FOLDER / "packages")

    def install(self, wheel: Path) -> None:
        """Unpack a wheel where Python looks first."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._files / "site")

    def run(self, *command: str, timeout_s: float, variables: Mapping[str, str] | None = None) -> str:
        """Run a command; returns what the command prints. Fails with both streams where the command does."""
        given = {
            "PATH": "/usr/bin",
            "HOME": "/tmp",
            "USER": "root",
            "LANG": "C.UTF-8",
            "QEMU_CPU": _PROCESSOR,
            "PYTHONPATH": "/files/site:/packages",
            **(variables or {}),
        }
        bits = ["".join(f"\\x{text[at : at + 2]}" for at in range(0, len(text), 2)) for text in (_MAGIC, _MASK)]
        spaces = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        script = ["sh", "-c", _INSIDE, "sh", FOLDER / "root", FOLDER / "packages", self._files]
        inside = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in given.items()), *command]
        done = subprocess.run(
            [*spaces, *script, str(shutil.which(QEMU)), ":".join(bits), *inside],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout


def _fetch_debian(root: Path) -> None:
    """Unpack Debian's packages: none is configured, as Python and binutils need nothing of it."""
    new = root.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    include = f"--include={','.join(_DEBIAN)}"
    debootstrap = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", include, "bookworm", new]
    new.mkdir(parents=True)
    subprocess.run(debootstrap, check=True, stdout=subprocess.DEVNULL)
    archives = new / "var/cache/apt/archives"
    for package in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, new], check=True)
    shutil.rmtree(archives)
    for name in ("packages", "files"):
        (new / name).mkdir()
    new.rename(root)


def _fetch_packages(folder: Path) -> None:
    """Install the wheels for AArch64 that the backend needs, of the releases that are tested."""
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    # pip takes the platforms at their word: an older glibc is another platform.
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 37)]
    options = [*platforms, "--platform=manylinux2014_aarch64", f"--python-version={_PYTHON}", "--only-binary=:all:"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, *options, "--target", new, *_PACKAGES], check=True)
    new.rename(folder)
