"""What a benchmark ran on, recorded beside its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

_PACKAGES = ("torch", "apache-tvm", "numpy", "transformers", "torch-hybrid-backend")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide speed; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe() -> dict[str, object]:
    """Processor, cores, threads, vector instructions, system, versions and the day (UTC)."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def slug() -> str:
    """A folder's name for results of machines like this one: "amd-epyc-2core-avx512"."""
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu|@.*", "", cpu_name().lower())).strip("-")
    return f"{name}-{os.cpu_count()}core-{torch.backends.cpu.get_cpu_capability().lower()}"
