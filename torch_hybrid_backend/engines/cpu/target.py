"""Target: the processor that kernels are compiled for, as data.

`Target.named` is a processor by its name or its features, wherever this runs. `Target.host()` asks the operating system and CPUID, not TVM:
importing TVM costs a second, and a process that finds all its kernels in the cache never does. `tvm_target` turns either into TVM's own object
inside the compiler process, where LLVM names the processor.
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

from torch_hybrid_backend.engines.cpu.isa import (
    ARCHITECTURES,
    FEATURES,
    FEATURES_OF_CAPABILITY,
    FIRST_PROCESSOR,
    NEON_FEATURES,
    SCALABLE,
    TARGETS,
    X86_FEATURES,
    Architecture,
    Isa,
    isa_of,
    widest_lanes,
)
from torch_hybrid_backend.errors import ConfigError, did_you_mean, failures
from torch_hybrid_backend.machine import cpuinfo, flags, flags_within, is_of_tiles

_log = logging.getLogger(__name__)

NATIVE = "native"
# Of the caches of x86 and of ARM servers.
LINE_BYTES = 64
# Where the operating system does not tell: the smallest of any processor with AVX2 or NEON in use.
_DEFAULT_L1_BYTES, _DEFAULT_L2_BYTES = 32 << 10, 256 << 10
# Kernels for another architecture are compiled for this target beside it, so that they are checked where they are made.
_STAND_IN = "x86-64-v3"
# Kernels for a named target are cut up for so many cores, whatever runs them: with fewer, each core has more parts; some kernels use no more.
_NAMED_CORES = 8


@dataclass(frozen=True, slots=True)
class Target:
    """A processor.

    `mcpu`: LLVM's name for it, or "native": LLVM looks for itself. `cpu`: vendor, family, model and a hash of all its flags.
    `features`: the extensions that matter to kernels, as Linux spells them, sorted. `lanes`: float32 values in a vector register
    that schedules should use. `cores`: physical cores this process may run on. `l1_bytes`, `l2_bytes`: data cache of one core.
    `architecture`: of a named target, a name in `ARCHITECTURES`; "" for this machine's.
    """

    mcpu: str
    cpu: str
    features: tuple[str, ...]
    lanes: int
    cores: int
    l1_bytes: int
    l2_bytes: int
    architecture: str = ""

    @staticmethod
    def host(root: Path = Path("/")) -> Target:
        """The machine this process runs on. `root` holds `proc/` and `sys/`; where they are absent, portable guesses are made."""
        cpu, found = _cpu_and_flags(root)
        features = tuple(sorted(found & FEATURES))
        l1_bytes, l2_bytes = _cache_bytes(root)
        return Target(NATIVE, cpu, features, widest_lanes(features), _cores(root), l1_bytes, l2_bytes)

    @staticmethod
    def named(name: str) -> Target:
        """The target called `name`: one of `TARGETS`, or a triple of Linux such as "aarch64-linux-gnu"; behind either, more features by LLVM's
        names ("neoverse-n1,+i8mm"). A target is the same on all machines, so that they share kernels. Raises ConfigError for
        another name, and for a feature that kernels do not use.
        """
        base, *more = (part.strip() for part in name.split(","))
        if others := [part for part in more if part in (NATIVE, *TARGETS) or _architectures(part)]:
            raise ConfigError(
                f"target (HYBRID_TARGET, options['target'] or --target) is {name!r}, and only files are for several targets (hybrid export, or "
                f"torch_hybrid_backend.export): name one of {base} and {' and '.join(others)}"
            )
        if base == NATIVE:
            raise ConfigError(
                f"target (HYBRID_TARGET, options['target'] or --target) is {name!r}, and features cannot follow {NATIVE}: it has all that this "
                f"machine has; write {NATIVE} alone, or features behind the name of a processor, such as 'x86-64-v3,+avx512f'"
            )
        if base in TARGETS:
            architecture, known = TARGETS[base]
        else:
            found = _architectures(base)
            if base.startswith(("+", "-")):
                raise ConfigError(
                    f"target (HYBRID_TARGET, options['target'] or --target) is {name!r}; features stand behind the name of a processor, as in "
                    "'armv8-a,+dotprod', and none can be taken away: name a processor without it"
                )
            if not found:
                names = (NATIVE, *TARGETS, *(each.triple for each in ARCHITECTURES.values()))
                written = [f"+{feature}" for each in ARCHITECTURES.values() for feature in each.features]
                likely = did_you_mean(base, (*names, *written)).rstrip(" ")
                raise ConfigError(
                    f"target (HYBRID_TARGET, options['target'] or --target) is {name!r}, and no target is called {base!r}; there are "
                    f"{', '.join(names)}; features may follow any but {NATIVE}, such as 'armv8-a,+dotprod'. {likely}".rstrip(
                        " ."
                    )
                )
            architecture, known = found[0], found[0].baseline
        features = tuple(sorted(known | {_feature(each, architecture, name) for each in more}))
        return Target(
            base if base in TARGETS and architecture.features is X86_FEATURES else architecture.mcpu,
            "",
            features,
            widest_lanes(features),
            _NAMED_CORES,
            _DEFAULT_L1_BYTES,
            _DEFAULT_L2_BYTES,
            architecture.name,
        )

    @staticmethod
    def names(setting: str) -> list[str]:
        """The names in the setting `target`, of targets that differ; several are separated by commas, as features are behind each: a feature
        begins with "+". Raises as `named`."""
        names: dict[Target | None, str] = {}
        for name in re.split(r",(?!\+)", setting):
            names.setdefault(None if name == NATIVE else Target.named(name), name)
        return list(names.values())

    @staticmethod
    def foreign(name: str) -> Target | None:
        """The target of the setting `target` if this machine cannot run its code, else None. Raises as `named`."""
        target = None if name == NATIVE else Target.named(name)
        return target if target is not None and target.is_foreign else None

    @property
    def is_foreign(self) -> bool:
        """True if this machine cannot run the target's machine code, whatever its features."""
        return self.architecture not in ("", platform.machine())

    @property
    def here(self) -> Target:
        """The target that this machine runs kernels of: for a foreign one its stand-in, which is the same on all machines."""
        return Target.named(_STAND_IN) if self.is_foreign else self

    @property
    def label(self) -> str:
        """The target in words."""
        return " ".join((self.architecture, *self.features)) if self.architecture else self.mcpu

    def within(self, capability: str) -> Target:
        """This processor with no more than what PyTorch uses of it (`torch.backends.cpu.get_cpu_capability()`).

        PyTorch can be held to AVX2 where there is AVX-512 (ATEN_CPU_CAPABILITY=avx2): kernels then have vectors of 8 lanes too.
        """
        features = flags_within(self.features, capability)
        return self if features == self.features else replace(self, features=features, lanes=widest_lanes(features))

    def permitted(self, may_use_tiles: Callable[[], bool]) -> Target:
        """This processor without AMX, where the operating system does not let this process use its tile registers; asked only where it has AMX.

        The first instruction on tiles would end the process. Kernels are compiled in other processes and run in this one, so what counts is
        what this one may do, before any key is made.
        """
        features = tuple(name for name in self.features if not is_of_tiles(name))
        return self if features == self.features or may_use_tiles() else replace(self, features=features)

    @property
    def isa(self) -> Isa:
        """The instructions that kernels for this processor may use."""
        return isa_of(self.features, self.lanes)

    @property
    def fingerprint(self) -> str:
        """A text for cache keys: equal for two processes exactly where a kernel of one is the right kernel for the other."""
        machine = (self.architecture, self.mcpu, self.cpu, self.here.mcpu if self.is_foreign else "")
        parts = (*machine, ",".join(self.features), self.lanes, self.cores, self.l1_bytes, self.l2_bytes)
        return "|".join(map(str, parts))


def _architectures(triple: str) -> list[Architecture]:
    """The architecture that a triple of Linux with glibc names, such as "aarch64-linux-gnu" or "aarch64-unknown-linux-gnu"; [] for others."""
    return [each for each in ARCHITECTURES.values() if re.fullmatch(rf"{each.name}-(\w+-)?linux-gnu", triple)]


def _feature(text: str, architecture: Architecture, target: str) -> str:
    """Linux's name of a feature that is written as "+dotprod". Raises ConfigError for others."""
    name = text.removeprefix("+")
    if text.startswith("+") and name in architecture.features:
        return architecture.features[name]
    start = f"target (HYBRID_TARGET, options['target'] or --target) is {target!r}: "
    if name in SCALABLE and architecture.baseline is NEON_FEATURES:
        raise ConfigError(
            f"{start}no kernel uses {name}: its vectors have a length that only the processor knows, and schedules cut up registers of a known "
            "length; leave it out, as processors with it also run NEON"
        )
    by_linux = {linux: llvm for llvm, linux in architecture.features.items()}
    hint = did_you_mean(f"+{by_linux.get(name, name)}", [f"+{each}" for each in architecture.features])
    raise ConfigError(
        f"{start}{text!r} is no feature that kernels of {architecture.name} use; features are written as '+NAME', of "
        f"{', '.join(architecture.features)}. {hint}".rstrip(" .")
    )


# Schedules unroll themselves what is to be unrolled. LLVM, to find out whether more would gain, runs through the iterations of every loop that
# has at most ten: with at most five the code is the same, byte by byte, for 102 kernels of three models, in 4 % less time.
_LLVM = {"kind": "llvm", "cl-opt": ["-unroll-max-iteration-count-to-analyze:uint=5"]}


def tvm_target(target: Target) -> Any:
    """`target` as a tvm.target.Target. Imports TVM.

    LLVM knows the host by its model number, but a virtual machine may hide extensions that model has: those that LLVM would use and
    the operating system does not show are switched off. A machine may also show the number of an older model: one with AMX is then tuned for
    as the first processor that had it. A host of AArch64 is described to LLVM by its features alone, as named targets are.
    """
    import tvm
    from tvm.target import codegen

    if target.architecture or platform.machine() == "aarch64":
        # LLVM gets every feature by name, so that machine code uses none that a file does not tell of, or that Linux does not show of a host:
        # LLVM's models of Arm processors have SVE, and inner loops are equal with a model's name and without (docs/adr/0118).
        of = ARCHITECTURES[target.architecture or platform.machine()]
        mcpu = of.mcpu if target.mcpu == NATIVE else target.mcpu
        attributes = [f"+{llvm}" for llvm, linux in of.features.items() if linux in target.features]
        named = {"mtriple": of.triple, "mcpu": mcpu, "mattr": attributes, "num-cores": target.cores}
        if of.abi:
            named["mabi"] = of.abi
        if of.options:
            named["cl-opt"] = [*_LLVM["cl-opt"], *of.options]
        return tvm.target.Target({**_LLVM, **named})
    if target.mcpu != NATIVE:
        return tvm.target.Target({**_LLVM, "mcpu": target.mcpu, "num-cores": target.cores})
    mcpu = str(codegen.llvm_get_system_cpu())
    named = {**_LLVM, "mcpu": mcpu, "num-cores": target.cores}
    if platform.machine().lower() not in ("x86_64", "amd64") or not target.features:
        return tvm.target.Target(named)
    used = _llvm_features(named)
    for extension, processor in FIRST_PROCESSOR.items():
        if X86_FEATURES[extension] in target.features and extension not in used:
            named["mcpu"] = mcpu = processor
            used = _llvm_features(named)
    hidden = [llvm for llvm, linux in X86_FEATURES.items() if llvm in used and linux not in target.features]
    # A processor newer than LLVM has a generic name: the extensions it shows are switched on.
    unused = [llvm for llvm, linux in X86_FEATURES.items() if llvm not in used and linux in target.features]
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
    found = flags(root) or _flags_without_proc()
    identity = [platform.machine()]
    # x86 names the first four, Arm the rest.
    for name in ("vendor_id", "cpu family", "model", "stepping", "cpu implementer", "cpu variant", "cpu part"):
        identity.append(fields.get(name, ""))
    if not fields:
        identity.append(platform.processor())
    digest = hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]
    return " ".join(part for part in (*identity, digest) if part), found


def _flags_without_proc() -> frozenset[str]:
    """Features that PyTorch found (macOS, Windows), spelled as Linux would. The processor may have more."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return NEON_FEATURES
    import torch

    return FEATURES_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), frozenset())


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
