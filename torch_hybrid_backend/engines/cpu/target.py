"""Target: what kernels are compiled for, as data.

`Target.host()` looks at the operating system only: importing TVM costs a second, and a process that finds all its kernels in the
cache never does. `tvm_target` turns it into TVM's own object inside the compiler process, where LLVM names the processor.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.machine import cpuinfo

_log = logging.getLogger(__name__)

NATIVE = "native"
# Of the caches of x86 and of ARM servers.
LINE_BYTES = 64
# What LLVM calls an instruction set extension -> what Linux calls it. Only those that LLVM might use in a kernel unasked, and AMX-FP16. Linux
# has no names for that, AVX-VNNI-INT8 and AVX10 (its arch/x86/include/asm/cpufeatures.h keeps them for guests of KVM): PyTorch is asked for the
# first, kernels do without the others.
_X86_FEATURES = {
    "adx": "adx",
    "amx-bf16": "amx_bf16",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx": "avx",
    "avx2": "avx2",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512f": "avx512f",
    "avx512fp16": "avx512_fp16",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "gfni": "gfni",
    "lzcnt": "abm",
    "movbe": "movbe",
    "popcnt": "popcnt",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
}
_ARM_FEATURES = ("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2")
# Where the operating system does not tell: the smallest of any processor with AVX2 or NEON in use.
_DEFAULT_L1_BYTES, _DEFAULT_L2_BYTES = 32 << 10, 256 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """A processor.

    `mcpu`: LLVM's name for it, or "native": LLVM looks for itself. `cpu`: vendor, family, model and a hash of all its flags.
    `features`: the extensions that matter to kernels, as Linux spells them, sorted. `lanes`: float32 values in a vector register
    that schedules should use. `cores`: physical cores this process may run on. `l1_bytes`, `l2_bytes`: data cache of one core.
    """

    mcpu: str
    cpu: str
    features: tuple[str, ...]
    lanes: int
    cores: int
    l1_bytes: int
    l2_bytes: int

    @staticmethod
    def host(root: Path = Path("/")) -> Target:
        """The machine this process runs on. `root` holds `proc/` and `sys/`; where they are absent, portable guesses are made."""
        cpu, flags = _cpu_and_flags(root)
        relevant = (*_X86_FEATURES.values(), *_ARM_FEATURES)
        features = tuple(sorted(flags.intersection(relevant)))
        l1_bytes, l2_bytes = _cache_bytes(root)
        return Target(NATIVE, cpu, features, widest_lanes(features), _cores(root), l1_bytes, l2_bytes)

    def within(self, capability: str) -> Target:
        """This processor with no more than what PyTorch uses of it (`torch.backends.cpu.get_cpu_capability()`).

        PyTorch can be held to AVX2 where there is AVX-512 (ATEN_CPU_CAPABILITY=avx2): kernels then have vectors of 8 lanes too.
        """
        if capability != "AVX2":
            return self
        features = tuple(name for name in self.features if not name.startswith(("avx512", "amx")))
        return replace(self, features=features, lanes=widest_lanes(features))

    def permitted(self, may_use_tiles: Callable[[], bool]) -> Target:
        """This processor without AMX, where the operating system does not let this process use its tile registers; asked only where it has AMX.

        The first instruction on tiles would end the process. Kernels are compiled in other processes and run in this one, so what counts is
        what this one may do, before any key is made.
        """
        features = tuple(name for name in self.features if not name.startswith("amx"))
        return self if features == self.features or may_use_tiles() else replace(self, features=features)

    @property
    def fingerprint(self) -> str:
        """A text for cache keys: equal for two processes exactly where a kernel of one is the right kernel for the other."""
        parts = (self.mcpu, self.cpu, ",".join(self.features), self.lanes, self.cores, self.l1_bytes, self.l2_bytes)
        return "|".join(map(str, parts))


def widest_lanes(features: tuple[str, ...]) -> int:
    """float32 lanes of the widest vectors: 16 with AVX-512, 8 with AVX2, else 4 (SSE, NEON)."""
    if "avx512f" in features:
        return 16
    return 8 if "avx2" in features else 4


# Schedules unroll themselves what is to be unrolled. LLVM, to find out whether more would gain, runs through the iterations of every loop that
# has at most ten: with at most five the code is the same, byte by byte, for 102 kernels of three models, in 4 % less time.
_LLVM = {"kind": "llvm", "cl-opt": ["-unroll-max-iteration-count-to-analyze:uint=5"]}
# LLVM's name for the first processor with AMX.
_WITH_TILES = "sapphirerapids"


def tvm_target(target: Target) -> Any:
    """`target` as a tvm.target.Target. Imports TVM.

    LLVM knows the host by its model number, but a virtual machine may hide extensions that model has: those that LLVM would use and
    the operating system does not show are switched off. A machine may also show the number of an older model: one with AMX is then tuned for
    as the first processor that had it.
    """
    import tvm
    from tvm.target import codegen

    if target.mcpu != NATIVE:
        return tvm.target.Target({**_LLVM, "mcpu": target.mcpu, "num-cores": target.cores})
    mcpu = str(codegen.llvm_get_system_cpu())
    named: dict[str, Any] = {**_LLVM, "mcpu": mcpu, "num-cores": target.cores}
    if platform.machine().lower() not in ("x86_64", "amd64") or not target.features:
        return tvm.target.Target(named)
    used = _llvm_features(named)
    if "amx_tile" in target.features and "amx-tile" not in used:
        named["mcpu"] = mcpu = _WITH_TILES
        used = _llvm_features(named)
    hidden = [llvm for llvm, linux in _X86_FEATURES.items() if llvm in used and linux not in target.features]
    # A processor newer than LLVM has a generic name: the extensions it shows are switched on.
    unused = [llvm for llvm, linux in _X86_FEATURES.items() if llvm not in used and linux in target.features]
    if hidden or unused:
        _log.info("LLVM's %s is adapted to this machine: without %s, with %s", mcpu, hidden, unused)
        named["mattr"] = [*(f"+{name}" for name in unused), *(f"-{name}" for name in hidden)]
    return tvm.target.Target(named)


def _llvm_features(named: Mapping[str, Any]) -> set[str]:
    """Extensions that LLVM would use on a target, by LLVM's names."""
    import tvm
    from tvm.target import codegen

    return {str(feature) for feature in codegen.llvm_get_cpu_features(tvm.target.Target(named))}


def _cpu_and_flags(root: Path) -> tuple[str, frozenset[str]]:
    """The processor's identity and its flags as Linux spells them."""
    try:
        fields = cpuinfo(root)
    except failures(OSError):
        fields = {}
    flags = frozenset((fields.get("flags") or fields.get("features") or "").split())
    if not flags:
        flags = _flags_without_proc()
    elif "amx_tile" in flags and root == Path("/") and torch_sees("amx_fp16"):
        flags |= {"amx_fp16"}
    identity = [platform.machine()]
    # x86 names the first four, Arm the rest.
    for name in ("vendor_id", "cpu family", "model", "stepping", "cpu implementer", "cpu variant", "cpu part"):
        identity.append(fields.get(name, ""))
    if not fields:
        identity.append(platform.processor())
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:16]
    return " ".join(part for part in (*identity, digest) if part), flags


def torch_sees(flag: str) -> bool:
    """True if PyTorch, which asks the processor itself, has found an extension; not every version of it tells."""
    import torch

    tell = getattr(torch.cpu, "get_capabilities", None)
    return tell is not None and bool(tell().get(flag))


def _flags_without_proc() -> frozenset[str]:
    """Features that PyTorch found (macOS, Windows), spelled as Linux would. The processor may have more."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return frozenset(("asimd",))
    import torch

    avx2 = ("sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
    match torch.backends.cpu.get_cpu_capability():
        case "AVX512" | "AVX512_VNNI":
            return frozenset((*avx2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
        case "AVX2":
            return frozenset(avx2)
    return frozenset()


def _cores(root: Path) -> int:
    """Physical cores among the processors this process may run on."""
    try:
        allowed = os.sched_getaffinity(0)
    except failures(AttributeError, OSError):  # not on macOS and Windows
        return max(1, os.cpu_count() or 1)
    cores = set()
    for number in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        try:
            cores.add(tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id")))
        except failures(OSError):
            return max(1, len(allowed))
    return max(1, len(cores))


def _cache_bytes(root: Path) -> tuple[int, int]:
    """Sizes of the level 1 data cache and the level 2 cache of processor 0."""
    sizes = {1: _DEFAULT_L1_BYTES, 2: _DEFAULT_L2_BYTES}
    units = {"": 1, "K": 1 << 10, "M": 1 << 20}
    for cache in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
        except failures(OSError):
            continue
        found = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind in ("Data", "Unified") and level in ("1", "2") and found and int(found[1]) > 0:
            sizes[int(level)] = int(found[1]) * units[found[2]]
    return sizes[1], sizes[2]
