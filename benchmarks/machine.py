"""The machine of a benchmark, recorded beside its figures: what `torch_hybrid_backend.bench.machine` tells, and the clone that is measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_hybrid_backend.bench import machine
from torch_hybrid_backend.bench.machine import PACKAGES, cpu_model, cpu_name, hybrid_settings

__all__ = ["cpu_name", "describe", "hybrid_settings", "revision", "slug", "versions", "write_record"]

# Packages that would disturb others lie below sys.prefix, each in a folder that only its users look into.
FOLDERS_APART = ("peers", "torchvision", "ecosystem")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages, in folders apart too; absent ones are left out."""
    return machine.versions(packages, FOLDERS_APART)


def describe() -> dict[str, object]:
    """Processor, cores, threads, vector instructions, system, versions and the day (UTC)."""
    return machine.describe() | {"versions": versions()}


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
