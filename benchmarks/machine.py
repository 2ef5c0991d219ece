"""What a benchmark ran on, recorded beside its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_PACKAGES = (
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

# Packages that would disturb others lie below sys.prefix, each in a folder that only its users look into.
FOLDERS_APART = ("peers", "torchvision", "ecosystem")


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages (those that decide speed), in folders apart too; absent ones are left out."""
    found = {"python": platform.python_version()}
    path = [*sys.path, *(str(Path(sys.prefix) / name) for name in FOLDERS_APART)]
    for package in packages:
        distribution = next(iter(importlib.metadata.distributions(name=package, path=path)), None)
        if distribution is not None:
            found[package] = distribution.version
    return found


def hybrid_settings() -> dict[str, str]:
    """The settings of this package that the environment changes, but for the place of the cache."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("HYBRID_") and k != "HYBRID_CACHE_DIR"}


def _cpu_info() -> dict[str, str]:
    """What the system tells of its first processor; nothing where it tells nothing."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first = info.read_text().partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}


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


def revision() -> str:
    """The commit of the clone that is measured, with "-dirty" where files other than results differ from it; empty outside of a clone."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def slug() -> str:
    """A folder's name for results of machines like this one: "amd-epyc-26-2-2core-avx512".

    A marketing name without a number, as virtual machines show it, is that of several generations: family and model tell them apart.
    """
    name = re.sub(r"\((r|tm)\)|processor|cpu|@.*", "", cpu_name().lower())
    if not any(character.isdigit() for character in name):
        name += f" {cpu_model()}"
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"{name}-{os.cpu_count()}core-{torch.backends.cpu.get_cpu_capability().lower()}"


def write_record(path: Path, **figures: object) -> None:
    """Write {"machine": ..., **figures} as JSON, in one step: a run that is stopped leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"machine": describe(), **figures}, indent=1) + "\n")
    os.replace(new, path)
