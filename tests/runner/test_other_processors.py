"""The runner that `make runner TARGET=...` builds, on processors that QEMU emulates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runner.hybrid_files import HybridFile, doubling_plan, named
from tests.runner.machines import ARM, ROOT, X86, Machine, needed
from tests.runner.runner_in_python import run

CROSS = ROOT / ".venv/cross"
ZIG = CROSS / "ziglang/zig"
# What `make runner` has compiled of the C++ runtime library is there.
SETTINGS = ("env", f"ZIG_GLOBAL_CACHE_DIR={CROSS}/cache", f"ZIG_LOCAL_CACHE_DIR={CROSS}/cache")
MOST_BYTES = 2 << 20
# Those of the C++ unit tests that need no tensors and no threads of PyTorch.
UNITS = (
    *("aligned_block", "arena", "coded_segment", "elf_header", "huffman", "hwcap", "json", "kept_blocks", "processor"),
    *("sha256", "size_table"),
)

pytestmark = pytest.mark.full

# Writes a file for several targets, in a process of its own.
_EXPORT = """
import torch, torch_hybrid_backend
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 10)]
model = torch.nn.Sequential(*layers).eval()
options = {{"target": ["armv8-a", "x86-64-v3", "neoverse-n1"], "placement": "estimate", "strict": True}}
torch_hybrid_backend.export(model, (torch.randn(2, 3, 8, 8),), {path!r}, options=options)
"""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return needed(ARM)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Machine], bytes]:
    """A library of csrc/tests/host_kernels.cc for a machine."""

    def build(machine: Machine) -> bytes:
        path = tmp_path_factory.mktemp("kernels") / "kernels.so"
        source = ROOT / "csrc/tests/host_kernels.cc"
        options = ("-std=c++20", "-O2", "-fPIC", "-shared", f"-I{ROOT / 'csrc/include'}")
        run(*SETTINGS, ZIG, "c++", "-target", machine.target, *options, source, "-o", path)
        return path.read_bytes()

    return build


def _file(path: Path, library: bytes, processor: str, *features: str) -> Path:
    """A file: y = 2 (2 x) + 5 for three elements, with a sample. Its library is said to be for that processor."""
    file = HybridFile(library, processor=processor, features=features)
    row, doubled = doubling_plan()
    file.entry(
        "forward",
        doubled,
        inputs=[named("x", row)],
        sources=[["input", 0]],
        results=[["output", 0]],
        outputs=[named("y", row)],
    )
    constants = [file.constant(np.array(values, np.float32)) for values in ([1, 2, 3], [9, 13, 17])]
    file.samples.append({"entry": "forward", "tolerance": 1e-6, "inputs": constants[:1], "outputs": constants[1:]})
    return file.write(path)


def test_it_needs_glibc_of_the_target_alone(machine: Machine) -> None:
    """The C++ runtime library is within it, and only the interface's functions are visible."""
    for name in ("bin/hybrid-run", "lib/libhybrid_runner.so"):
        shown = run("readelf", "-W", "-d", "-V", machine.folder / name)
        needed = set(re.findall(r"NEEDED\).*\[(.*)\]", shown)) - {"libhybrid_runner.so.1"}
        assert {library.partition(".so")[0] for library in needed} <= {
            "libc",
            "libm",
            "libdl",
            "libpthread",
            "ld-linux-aarch64",
        }
        versions = [tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", shown)]
        assert max(versions) <= machine.glibc
        assert (machine.folder / name).stat().st_size <= MOST_BYTES
    symbols = run("readelf", "-W", "--dyn-syms", machine.folder / "lib/libhybrid_runner.so").splitlines()
    defined = [line.split()[-1] for line in symbols if re.search(r"GLOBAL\s+DEFAULT\s+\d", line)]
    assert defined
    assert all(name.startswith("hybrid_") for name in defined), defined


def test_the_release_is_complete(machine: Machine) -> None:
    """Header, class, library, program, guide and licence, and what CMake finds the library by."""
    files = {path.relative_to(machine.folder).as_posix() for path in machine.folder.rglob("*") if path.is_file()}
    assert files >= {
        "bin/hybrid-run",
        "include/hybrid_runner.h",
        "include/hybrid_runner.hpp",
        "lib/libhybrid_runner.so",
        "lib/cmake/hybrid_runner/hybrid_runner-config.cmake",
        "share/doc/hybrid-runner/LICENSE",
        "share/doc/hybrid-runner/runner.md",
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_runs(machine: Machine, threads: int, kernels: Callable[[Machine], bytes], tmp_path: Path) -> None:
    """Checksums, the sample and a call, on one thread and on OpenMP's."""
    path = _file(tmp_path / "model.hybrid", kernels(machine), machine.processor)
    np.save(tmp_path / "x.npy", np.array([1, -2, 0.5], np.float32))
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy", "--threads", threads)
    done = machine.runs(machine.folder / "bin/hybrid-run", path, *files)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), [9, -3, 7])


@pytest.mark.fault(
    "a file is for another processor", "an error with both processors; nothing of the file is mapped as code"
)
def test_foreign_files(machine: Machine, kernels: Callable[[Machine], bytes], tmp_path: Path) -> None:
    """Processors of other kinds, byte orders and word sizes are refused, also where only the library's own header tells."""
    own, x86 = kernels(machine), kernels(X86)
    big = bytearray(own)
    big[5] = 2  # EI_DATA: ELFDATA2MSB
    big[18:20] = big[19:17:-1]  # e_machine
    small = bytearray(own)
    small[4] = 1  # EI_CLASS: ELFCLASS32
    here = "and this process is for aarch64 (little-endian, 64 bits)"
    for library, processor, said in [
        (x86, "x86_64", 'this processor (linux on aarch64); "library.0" is for "linux" on "x86_64"'),
        (own, "aarch64_be", 'this processor (linux on aarch64); "library.0" is for "linux" on "aarch64_be"'),
        (own, "armv7l", 'this processor (linux on aarch64); "library.0" is for "linux" on "armv7l"'),
        (x86, "aarch64", f"its library is for the processor x86_64 (little-endian, 64 bits), {here}"),
        (bytes(big), "aarch64", f"its library is for the processor aarch64 (big-endian, 64 bits), {here}"),
        (bytes(small), "aarch64", f"its library is for the processor aarch64 (little-endian, 32 bits), {here}"),
    ]:
        path = _file(tmp_path / "model.hybrid", library, processor)
        done = machine.runs(machine.folder / "bin/hybrid-run", path, emulator=("-strace",))
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
        assert "memfd_create" not in done.stderr  # which a library is given to the loader by


def test_features_of_arm(machine: Machine, kernels: Callable[[Machine], bytes], tmp_path: Path) -> None:
    """Features are those of the emulated processor, not of the machine that emulates it."""
    path = _file(tmp_path / "model.hybrid", kernels(machine), "aarch64", "asimd", "asimddp")
    refused = machine.runs(machine.folder / "bin/hybrid-run", path, emulator=("-cpu", "cortex-a72"))
    assert refused.returncode == 1
    assert '"library.0" needs "asimddp": export' in refused.stderr
    done = machine.runs(machine.folder / "bin/hybrid-run", path, emulator=("-cpu", "neoverse-n1"))
    assert done.returncode == 0, done.stderr


def test_each_processor_runs_its_own_of_one_file(machine: Machine, tmp_path: Path) -> None:
    """A file has kernels for x86-64 and for two processors of Arm: each of these takes the best that it supports, and computes the sample
    as eager did."""
    path = tmp_path / "model.hybrid"
    run(sys.executable, "-c", _EXPORT.format(path=str(path)))
    for processor, target in (("cortex-a72", "armv8-a"), ("neoverse-n1", "neoverse-n1"), ("max", "neoverse-n1")):
        program, emulator = machine.folder / "bin/hybrid-run", ("-cpu", processor)
        shown = machine.runs(program, path, "--inspect", emulator=emulator)
        assert shown.stdout.startswith(f"kernels: {target}/library\n"), shown.stdout + shown.stderr
        done = machine.runs(program, path, emulator=emulator)
        assert done.returncode == 0, done.stderr


def test_the_cpp_unit_tests_pass_on_arm(machine: Machine, tmp_path: Path) -> None:
    """Code for any processor, and AArch64's own, under the undefined-behaviour sanitiser."""
    variables: dict[str, Any] = {
        "CXX": f"{ZIG} c++ -target {machine.target}",
        "RUN": " ".join(machine.emulator),
        "SANITIZE": "undefined",
        "TESTS": " ".join(f"test_{name}" for name in UNITS),
        "OUT": tmp_path,
        "PYTHON": sys.executable,
    }
    command = [*SETTINGS, "make", f"-j{os.cpu_count() or 1}", "-C", str(ROOT / "csrc"), "test"]
    done = subprocess.run(
        [*command, *(f"{name}={text}" for name, text in variables.items())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
