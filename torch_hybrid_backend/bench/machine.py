"""The machine that figures were taken on, recorded beside them."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.machine import cpuinfo

PACKAGES = (
    "torch",
    "apache-tvm",
    "numpy",
    "transformers",
    "torchvision",
    "torch-hybrid-backend",
    "openvino",
    "onnxruntime",
    "onnx",
    "zentorch",
)


def versions(packages: Sequence[str] = PACKAGES, folders: Sequence[str] = ("peers",)) -> dict[str, str]:
    """Versions of Python and of the packages (those that decide speed), in `folders` below `sys.prefix` too; absent ones are left out."""
    found = {"python": platform.python_version()}
    path = [*sys.path, *(str(Path(sys.prefix) / name) for name in folders)]
    for package in packages:
        distribution = next(iter(importlib.metadata.distributions(name=package, path=path)), None)
        if distribution is not None:
            found[package] = distribution.version
    return found


def hybrid_settings() -> dict[str, str]:
    """The settings of this package that the environment changes, but for the place of the cache."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("HYBRID_") and k != "HYBRID_CACHE_DIR"}


def _cpu_info() -> Mapping[str, str]:
    """The system's facts of its first processor; empty if it tells none."""
    try:
        return cpuinfo(Path("/"))
    except failures(OSError):
        return {}


def cpu_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    return _cpu_info().get("model name", platform.machine())


def cpu_model() -> str:
    """Family and model of an x86 processor, "26/2", as far as the system tells them: virtual machines hide the marketing name's number."""
    return "/".join(_cpu_info().get(key, "") for key in ("cpu family", "model"))


def describe() -> dict[str, object]:
    """Processor, cores, threads, vector instructions, system, versions and the day (UTC)."""
    return {
        "cpu": cpu_name(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "day": today(),
    }


def today() -> str:
    """The day (UTC)."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
