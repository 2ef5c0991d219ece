"""Resource usage of a kernel, read from its machine code by NVIDIA's `cuobjdump`, which comes with Triton. No GPU is needed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """`registers`: of a thread. `shared_bytes`: of a program. `spill_bytes`: the stack and local memory of a thread, where registers are
    spilled (and where libdevice keeps a table in the slow paths of sin, cos and tan: a kernel with one of them has some without a spill)."""

    registers: int
    shared_bytes: int
    spill_bytes: int


def resource_usage(cubin: bytes, dynamic_shared_bytes: int = 0) -> Usage:
    """The resources of the one kernel of a cubin. Triton's kernels get their shared memory when they are launched: a cubin does not know of it.
    `dynamic_shared_bytes`: an artifact's `Header.shared_bytes`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [nvidia_tool("cuobjdump"), "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    (line,) = (line for line in listing.splitlines() if "REG:" in line)
    used = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}
    return Usage(used["REG"], used["SHARED"] + dynamic_shared_bytes, used["STACK"] + used["LOCAL"])


def nvidia_tool(name: str) -> str:
    """A tool that comes with Triton, found without importing it: it reads its settings when it is imported."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
