"""The build backend: setuptools', with one sentence within seconds where a build cannot succeed.

pip asks it what a build requires before it downloads any of that. torch is not in the answer: build isolation would download a build for
CUDA, of gigabytes, for the headers alone. They are those of the installed torch, with which the package will run.
"""

import importlib.util
import os
import platform
import sys
import sysconfig
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 - pip looks at requires-python later, when the requirements are there
    sys.exit("torch-hybrid-backend needs Python 3.11 or later; this is Python " + platform.python_version())
if sys.platform != "linux":
    sys.exit(
        f"torch-hybrid-backend supports Linux on x86-64 and AArch64; this is {platform.system()} on {platform.machine()}"
    )

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
    "torch_folder",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> Any:
    """Return what setuptools requires, on a machine that can build."""
    torch_folder()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> Any:
    """Return what setuptools requires, on a machine that can build."""
    torch_folder()
    return build_meta.get_requires_for_build_editable(config_settings)


def torch_folder() -> str:
    """Return the folder of the installed torch, also under build isolation, which hides it from imports; HYBRID_BUILD_TORCH names another
    processor's (`make wheel TARGET=aarch64`). Exit if there is none."""
    if folder := os.environ.get("HYBRID_BUILD_TORCH"):
        if os.path.isdir(os.path.join(folder, "include")):
            return os.path.abspath(folder)
        sys.exit(
            f"HYBRID_BUILD_TORCH is {folder!r}, which has no folder 'include'; it must be the folder 'torch' of an installed torch"
        )
    spec = importlib.util.find_spec("torch")
    visible = list(spec.submodule_search_locations or ()) if spec else []
    for folder in (*visible, os.path.join(sysconfig.get_path("platlib"), "torch")):
        if os.path.isdir(os.path.join(folder, "include")):
            return folder
    sys.exit(
        "torch-hybrid-backend is built against torch, which is not installed here: install torch 2.11 or later first (its build for CPUs is "
        "enough), then try again, with --no-build-isolation if the installer builds in an environment of its own, as uv does"
    )
