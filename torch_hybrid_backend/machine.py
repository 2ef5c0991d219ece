"""The machine as texts: what a timing on a device depends on besides the work itself. Utility: imports core only.

fingerprint(CPU)              "x86_64|AMD EPYC ...|AVX512|threads 2 of 2|matmul highest mkldnn True|torch 2.13.0+cpu|hybrid 0.1.0"
fingerprint(Device("cuda"))   the same with the GPU, its capability, the driver and the settings of cuBLAS and cuDNN
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch_hybrid_backend import __version__

if TYPE_CHECKING:
    from torch_hybrid_backend.core.device import Device


def fingerprint(device: Device) -> str:
    """What a timing on `device` depends on, now. On the host: processor, its instruction set as PyTorch uses it, threads and the
    processors they may use, settings of PyTorch's that change kernels, versions. Elsewhere the device as well: it is fed by the host."""
    import torch  # not above: processes that compile kernels read `cpuinfo`, and must stay small

    parts = [
        platform.machine(),
        processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"threads {torch.get_num_threads()} of {processors()}",
        f"matmul {torch.get_float32_matmul_precision()} mkldnn {torch.backends.mkldnn.enabled}",
        f"torch {torch.__version__}",
        f"hybrid {__version__}",
    ]
    return "|".join(parts)


def processors() -> int:
    """How many logical processors this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """The processor's name."""
    try:
        return cpuinfo(Path("/")).get("model name", "")
    except OSError:
        return platform.processor()


def cpuinfo(root: Path) -> Mapping[str, str]:
    """What Linux says of the first processor (`proc/cpuinfo` below `root`), names in lower case. Raises OSError where it says nothing."""
    text = (root / "proc/cpuinfo").read_text(errors="replace")
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip().lower()] = value.strip()
    return fields
