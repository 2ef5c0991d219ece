"""Builds csrc/src and csrc/torch into torch_hybrid_backend/_runtime.so; everything else is in pyproject.toml.

The library registers operators when torch.ops.load_library opens it, and is a Python module on the limited API; of LibTorch it
uses the stable ABI only. So one build serves every Python from 3.11 and torch from 2.11 on. In place:
`python setup.py build_ext --inplace`; with HYBRID_BUILD_ASAN=1 it is built with AddressSanitizer.
"""

from __future__ import annotations

import os
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


class BuildRuntime(build_ext):
    """Finds torch's headers when building (not before: metadata must not need them)."""

    def build_extension(self, ext: Extension) -> None:
        folder = torch_folder()
        # As system headers: their warnings are not ours.
        ext.extra_compile_args += ["-isystem", f"{folder}/include"]
        ext.library_dirs.append(f"{folder}/lib")
        super().build_extension(ext)

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


runtime = Extension(
    "torch_hybrid_backend._runtime",
    sources=[*_files("csrc/src", "*.cc"), *_files("csrc/torch", "*.cc")],
    depends=[*_files("csrc/include", "*.h"), *_files("csrc/torch", "*.h")],
    include_dirs=["csrc/include", "csrc/torch"],
    # libtorch_cpu is in the process already when this is opened; naming it makes the loader look there.
    libraries=["torch_cpu", "dl"],
    define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
    extra_compile_args=["-std=c++20", "-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread", *ASAN],
    extra_link_args=["-Wl,--no-as-needed", "-pthread", *ASAN],
    language="c++",
)

setup(ext_modules=[runtime], cmdclass={"build_ext": BuildRuntime, "bdist_wheel": AnyPythonWheel})
