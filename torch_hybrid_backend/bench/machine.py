"""Facts about the machine, recorded with each measurement."""

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
    """Versions of Python and of the installed `packages`, also those in `folders` below `sys.prefix`."""
    found = {"python": platform.python_version()}
    path = [*sys.path, *(str(Path(sys.prefix) / name) for name in folders)]
    for package in packages:
        distribution = next(iter(importlib.metadata.distributions(name=package, path=path)), None)
        if distribution is not None:
            found[package] = distribution.version
    return found


def hybrid_settings() -> dict[str, str]:
    """Settings of this package in the environment, except the folder of the cache."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("HYBRID_") and k != "HYBRID_CACHE_DIR"}


def _cpu_info() -> Mapping[str, str]:
    """Facts about the first processor, from the system; empty if there are none."""
    try:
        return cpuinfo(Path("/"))
    except failures(OSError):
        return {}


def cpu_name() -> str:
    """The processor's marketing name if the system reports it, else the architecture."""
    return _cpu_info().get("model name", platform.machine())


def cpu_model() -> str:
    """Family and model of an x86 processor, for example "26/2": virtual machines often hide the number in the marketing name."""
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
