"""A driver that tunes on a cluster, as a process of its own: Ray connects a process to one cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FACTORY = f"{Path(__file__).parent / 'factory_for_tests.py'}:make"

_TUNE = """
import dataclasses, json, os, sys
from pathlib import Path
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.tuning.cluster import tune_on_cluster
from torch_hybrid_backend.tuning.local import Request

address, factory, cache, budget, *wanted = sys.argv[1:]
config = Config(cache_dir=Path(cache), progress=False)
request = Request(factory, os.getcwd(), config, float(budget))
summary = tune_on_cluster(address, request, Progress("tuning", shown=False), *wanted)
state = dataclasses.asdict(summary.state)
entries = open_services(config).timings.entries("variants")
shown = {**state, "entries": entries, "notes": summary.notes, "settled": summary.is_settled, "hosts": summary.hosts}
print(json.dumps({**shown, "text": str(summary)}))
"""


def tuning(
    address: str, cache: Path, budget_s: float = 1e9, factory: str = FACTORY, *wanted: str
) -> subprocess.Popen[str]:
    """A process that tunes, and writes JSON last."""
    command = [sys.executable, "-c", _TUNE, address, factory, str(cache), str(budget_s), *wanted]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes(title: str, cache: Path) -> list[int]:
    """Ray's processes with this title whose cache, by their environment, is this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_one = (folder / "cmdline").read_bytes().startswith(f"ray::{title}".encode())
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if is_one and f"HYBRID_CACHE_DIR={cache}".encode() in environment:
            found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]
