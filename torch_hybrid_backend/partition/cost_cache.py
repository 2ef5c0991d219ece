"""Placement verdicts kept on disk, so that a second process need not time again.

An entry holds the microseconds of every contender for one region, under the region's key, the contenders with their
versions and the machine. A change of any of them is another entry.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import torch_hybrid_backend
from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.store import Store

_log = logging.getLogger(__name__)
_KIND = "verdicts"


def machine_fingerprint() -> str:
    """What a timing depends on besides the region, now: processor, its instruction set as PyTorch uses it, threads and the
    processors they may use, settings of PyTorch's that change kernels, versions."""
    return "|".join(
        (
            platform.machine(),
            _processor(),
            torch.backends.cpu.get_cpu_capability(),
            f"threads {torch.get_num_threads()} of {_processors()}",
            f"matmul {torch.get_float32_matmul_precision()} mkldnn {torch.backends.mkldnn.enabled}",
            f"torch {torch.__version__}",
            f"hybrid {torch_hybrid_backend.__version__}",
        )
    )


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class VerdictCache:
    """Costs by region, on a Store. `machine` is `machine_fingerprint()`, but for tests."""

    def __init__(self, store: Store, machine: str) -> None:
        self._store = store
        self._machine = machine

    def get(self, region_key: str, contenders: Mapping[str, str]) -> dict[str, float] | None:
        """Microseconds by engine as once measured for exactly these contenders (name -> version), or None."""
        data = self._store.get(_KIND, self._key(region_key, contenders))
        if data is None:
            return None
        try:
            costs = {str(name): float(cost) for name, cost in json.loads(data).items()}
        except (ValueError, AttributeError, TypeError):
            return None
        usable = costs.keys() == contenders.keys() and all(0 <= cost < math.inf for cost in costs.values())
        return costs if usable else None

    def put(self, region_key: str, contenders: Mapping[str, str], costs: Mapping[str, float]) -> None:
        """Keep the costs; a store that cannot be written costs a later process its timing, so it is logged, not
        raised."""
        data = json.dumps(dict(costs), sort_keys=True).encode()
        try:
            self._store.put(_KIND, self._key(region_key, contenders), data, suffix=".json")
        except CacheError as error:
            _log.info("the placement of a region is not kept: %s", error)

    def _key(self, region_key: str, contenders: Mapping[str, str]) -> str:
        form = json.dumps([region_key, sorted(contenders.items()), self._machine])
        return hashlib.sha256(form.encode()).hexdigest()
