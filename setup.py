"""Builds torch_hybrid_backend/_runtime.so of csrc/src and csrc/torch, and torch_hybrid_backend/runner/ of csrc/src, csrc/runner and
csrc/runner_torch.

The rest is in pyproject.toml. `_runtime.so` registers operators when torch.ops.load_library opens it, and is a Python module on the
limited API; of LibTorch it uses the stable ABI only. So one build serves every Python from 3.11 and torch from 2.11 on. In place:
`python setup.py build_ext --inplace`; with HYBRID_BUILD_ASAN=1 it is built with AddressSanitizer. HYBRID_BUILD_TORCH=FOLDER has it built
against the torch in that folder, another processor's (docs/adr/0123-the-wheel-for-aarch64-is-cross-compiled.md).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.partition(".")[0]) < 77:  # without build isolation it is whatever is installed
    sys.exit(
        f"setuptools {setuptools.__version__} cannot read pyproject.toml: pip install 'setuptools>=77', then try again"
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from build_backend import torch_folder

# torch 2.11, the oldest that is supported: newer functions of the stable ABI are then not even declared.
TORCH_TARGET_VERSION = "0x020b000000000000"
ROOT = Path(__file__).parent
ASAN = ["-g", "-fsanitize=address", "-fno-omit-frame-pointer"] if os.environ.get("HYBRID_BUILD_ASAN") == "1" else []


class BuildLibraries(build_ext):
    """Builds what needs torch's headers, looked for when building: metadata must not need them. And the runner, without them."""

    def build_extension(self, ext: Extension) -> None:
        build_temp = self.build_temp
        self.build_temp = str(Path(build_temp) / ext.name)  # all are built of csrc/src, each with headers of its own
        if ext is not runner:
            folder = torch_folder()
            # As system headers: their warnings are not ours.
            ext.extra_compile_args += ["-isystem", f"{folder}/include"]
            ext.library_dirs.append(f"{folder}/lib")
        super().build_extension(ext)
        if ext is runner:
            self._build_program(Path(self.get_ext_fullpath(ext.name)).parent)
        self.build_temp = build_temp

    def _build_program(self, folder: Path) -> None:
        """hybrid-run, which has the library's code in it, and the headers."""
        objects = self.compiler.compile(
            PROGRAM,
            output_dir=self.build_temp,
            include_dirs=runner.include_dirs,
            extra_postargs=runner.extra_compile_args,
        )
        objects += self.compiler.object_filenames(runner.sources, output_dir=self.build_temp)
        self.compiler.link_executable(
            objects,
            "hybrid-run",
            str(folder),
            libraries=runner.libraries,
            extra_postargs=["-pthread", *ASAN, *shlex.split(os.environ.get("LDFLAGS", ""))],
            target_lang="c++",
        )
        for header in ("hybrid_runner.h", "hybrid_runner.hpp"):
            shutil.copy(ROOT / "csrc/runner" / header, folder)

    def copy_extensions_to_source(self) -> None:
        (ROOT / RUNNER_FOLDER).mkdir(exist_ok=True)
        super().copy_extensions_to_source()
        for name in ("hybrid-run", "hybrid_runner.h", "hybrid_runner.hpp"):
            (ROOT / RUNNER_FOLDER / name).unlink(missing_ok=True)  # it may be running
            shutil.copy(Path(self.build_lib) / RUNNER_FOLDER / name, ROOT / RUNNER_FOLDER)

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # what is visible says so itself


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for any Python 3 of this platform: nothing in it is bound to one."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def _files(folder: str, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern))


# All libraries are compiled so.
COMPILE = ["-std=c++20", "-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread", *ASAN]

runtime = Extension(
    "torch_hybrid_backend._runtime",
    sources=[*_files("csrc/src", "*.cc"), *_files("csrc/torch", "*.cc")],
    depends=[*_files("csrc/include", "*.h"), *_files("csrc/torch", "*.h")],
    include_dirs=["csrc/include", "csrc/torch"],
    # libtorch_cpu is in the process already when this is opened; naming it makes the loader look there.
    libraries=["torch_cpu", "dl"],
    define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
    extra_compile_args=list(COMPILE),
    extra_link_args=["-Wl,--no-as-needed", "-pthread", *ASAN],
    language="c++",
)

# As csrc/runner/CMakeLists.txt builds it.
RUNNER_FOLDER = "torch_hybrid_backend/runner"
PROGRAM = ["csrc/runner/hybrid_run.cc", "csrc/runner/npy.cc"]
MAP = "csrc/runner/hybrid_runner.map"
runner = Extension(
    "torch_hybrid_backend.runner.libhybrid_runner",
    sources=[path for folder in ("csrc/src", "csrc/runner") for path in _files(folder, "*.cc") if path not in PROGRAM],
    depends=[*_files("csrc/include", "*.h"), *_files("csrc/runner", "*.h"), *PROGRAM, MAP],
    include_dirs=["csrc/include", "csrc/runner"],
    libraries=["dl"],
    extra_compile_args=list(COMPILE),
    extra_link_args=["-Wl,-z,nodelete", f"-Wl,--version-script={MAP}", "-pthread", *ASAN],
    language="c++",
)

# As csrc/runner/CMakeLists.txt builds it, under HYBRID_RUNNER_TORCH.
runner_torch = Extension(
    "torch_hybrid_backend.runner.libhybrid_runner_torch",
    sources=[
        "csrc/runner_torch/functions.cc",
        *(f"csrc/torch/{name}.cc" for name in ("device", "operator", "tensor")),
        *(f"csrc/src/{name}.cc" for name in ("aligned_block", "dtype", "json", "kept_blocks", "value")),
    ],
    depends=[*_files("csrc/include", "*.h"), *_files("csrc/torch", "*.h")],
    include_dirs=["csrc/include", "csrc/torch"],
    libraries=["torch_cpu", "dl"],
    define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
    extra_compile_args=list(COMPILE),
    # torch lies beside this package where both are installed.
    extra_link_args=["-Wl,-z,defs", "-Wl,-rpath,$ORIGIN/../../torch/lib", "-pthread", *ASAN],
    language="c++",
)

setup(
    ext_modules=[runtime, runner, runner_torch], cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPythonWheel}
)
