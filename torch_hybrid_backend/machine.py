"""The machine as texts: what a timing on a device depends on besides the work itself. Utility: imports core only.

fingerprint(CPU)              "x86_64|AMD EPYC ...|AVX512|threads 2 of 2|float32 ieee none mkldnn True|torch 2.13.0+cpu|hybrid 0.1.0"
fingerprint(Device("cuda"))   the same with the GPU, its capability, the driver and the settings of cuBLAS and cuDNN
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.errors import ArgumentError, failures

if TYPE_CHECKING:
    from torch_hybrid_backend.core.device import Device


def fingerprint(device: Device) -> str:
    """Key of all that a timing on `device` depends on, now. On the host: processor, its instruction set as PyTorch uses it, threads and the
    processors they may use, settings of PyTorch's that change kernels, versions. Elsewhere the device as well: it is fed by the host."""
    import torch  # not above: processes that compile kernels read `cpuinfo`, and must stay small

    parts = [
        platform.machine(),
        processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"threads {torch.get_num_threads()} of {processors()}",
        f"float32 {' '.join(float32_precision('cpu'))} mkldnn {torch.backends.mkldnn.enabled}",
        f"torch {torch.__version__}",
        f"hybrid {__version__}",
    ]
    if not device.is_host:
        parts += _accelerator(device)
    return "|".join(parts)


def unsupported() -> str:
    """Return a sentence that says what is supported and what this machine is, or "" on a supported machine."""
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return ""
    return f"torch_hybrid_backend supports Linux on x86-64 and AArch64; this is {system} on {machine}"


def _accelerator(device: Device) -> list[str]:
    """Parts of that key for a device other than the host. Of CUDA also the driver, the part of a GPU that MIG gives this process, and the
    settings of cuBLAS and cuDNN; of other devices what PyTorch tells of any. Never run on a GPU: there was none."""
    import torch

    module: Any = torch.get_device_module(device.type)
    parts = [f"{device.type} {module.get_device_name(device.index)}"]
    if device.type == "cuda":
        # A slice made by MIG has a name and numbers of its own: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", fewer multiprocessors, less memory.
        properties = module.get_device_properties(device.index)
        matmul: Any = torch.backends.cuda.matmul
        cudnn: Any = torch.backends.cudnn
        reduced = f"{matmul.allow_fp16_reduced_precision_reduction} {matmul.allow_bf16_reduced_precision_reduction}"
        size = f"multiprocessors {properties.multi_processor_count} memory {properties.total_memory}"
        parts += [
            f"capability {properties.major}.{properties.minor} {size}",
            f"driver {_driver()} runtime {torch.version.cuda}",
            f"float32 {' '.join(float32_precision('cuda'))} rnn {cudnn.rnn.fp32_precision} reduced {reduced}",
            f"cudnn {cudnn.version()} {cudnn.enabled} benchmark {cudnn.benchmark} deterministic {cudnn.deterministic}",
            f"attention {' '.join(attention_backends())} deterministic {torch.are_deterministic_algorithms_enabled()}",
            f"blas {torch.backends.cuda.preferred_blas_library()}",
        ]
    return parts


@functools.cache
def _driver() -> str:
    """The version of NVIDIA's driver as its kernel module tells it; "" where it does not."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except failures(OSError):
        return ""


# PyTorch's names for products of float32 that round as float32 does.
EXACT_PRECISIONS = frozenset({"none", "ieee"})


def float32_precision(device_type: str) -> tuple[str, str]:
    """Precisions to which products and convolutions of float32 may round on the host ("cpu") or on a GPU: one of `EXACT_PRECISIONS`, "tf32" or
    "bf16". Asked of each backend: `torch.get_float32_matmul_precision` raises where programs set them so, as PyTorch advises."""
    import torch

    backends: Any = torch.backends
    matmul, convolution = (
        (backends.mkldnn.matmul, backends.mkldnn.conv)
        if device_type == "cpu"
        else (backends.cuda.matmul, backends.cudnn.conv)
    )
    return matmul.fp32_precision, convolution.fp32_precision


def may_round_products() -> bool:
    """True if products of float32 on the host may round more than float32 does (`torch.set_float32_matmul_precision`)."""
    return float32_precision("cpu")[0] not in EXACT_PRECISIONS


@functools.cache
def may_use_tiles() -> bool:
    """True if this process may use AMX's tile registers. Linux lets processes that ask, as this does: csrc/include/tile_permission.h. Without
    the C++ runtime kernels are those of a processor without tiles."""
    runtime = _runtime()
    return runtime is not None and bool(runtime.may_use_tiles())


def _runtime() -> Any:
    """The C++ runtime as a module of Python; None where it was built for another Python."""
    import torch  # noqa: F401 - the C++ runtime is linked to it

    try:
        return importlib.import_module("torch_hybrid_backend._runtime")
    except ImportError:
        return None


def attention_backends() -> list[str]:
    """The back ends of scaled dot product attention that CUDA may use now."""
    import torch

    cuda: Any = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return [name for name, is_enabled in enabled.items() if is_enabled()]


def processors() -> int:
    """Number of logical processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def most_threads() -> int:
    """Largest number of threads that options may ask for. OpenMP's libraries end the process where there can be no so many. The runner has
    the same bound (`csrc/runner/worker_threads.cc`)."""
    return max(256, 4 * processors())


def check_threads(value: object, name: str) -> None:
    """Raise ArgumentError unless `value`, that of the option `name`, is a number of threads that a call may have."""
    if type(value) is not int or not 1 <= value <= most_threads():
        raise ArgumentError(
            f"{name} is {value!r}; it must be a whole number from 1 to {most_threads()} (256 or 4 times the processors)"
        )


@functools.cache
def parallelism() -> int:
    """Number of processes that can work at once for this one, when first asked: by the processors that it may use, and the time that its
    control groups give it on them."""
    quota = processor_quota()
    return processors() if quota is None else max(1, min(processors(), math.ceil(quota)))


def processor_quota(root: Path = Path("/")) -> float | None:
    """For how many processors the control groups of this process give it time, as Linux tells below `root`: those of version 2 (cpu.max) and
    of version 1 (cpu.cfs_quota_us), the least of a group and those above it (cgroups(7)). None where nothing limits it."""
    try:
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except failures(OSError):
        return None
    quotas = []
    for controllers, path in groups:
        for mount, (kind, _, options) in ((mount.split(), rest.split(" ", 2)) for mount, rest in mounts):
            is_ours = kind == "cgroup2" if not controllers else kind == "cgroup" and "cpu" in options.split(",")
            if not is_ours or (controllers and "cpu" not in controllers.split(",")):
                continue
            # In a container the mount may begin at a group further down than the path says.
            below = os.path.relpath(path, mount[3])
            top = root / mount[4].lstrip("/")
            folder = top if below.startswith("..") else top / below
            quotas += [_quota_of(group) for group in (folder, *folder.parents) if group.is_relative_to(top)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """For how many processors one group gives time; None for any number."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None
        except failures(OSError, ValueError):  # a group at the top has none
            continue
    return None


@functools.cache
def processor() -> str:
    """The processor's name; Arm's, for which Linux has none, by its numbers: implementer, part and variant."""
    try:
        return _name_of(cpuinfo(Path("/")))
    except failures(OSError):
        return platform.processor()


def _name_of(fields: Mapping[str, str]) -> str:
    """Name of a processor with these fields of /proc/cpuinfo; "" if they do not tell."""
    numbers = [f"{name} {fields[name]}" for name in ("cpu implementer", "cpu part", "cpu variant") if name in fields]
    return fields.get("model name") or " ".join(numbers)


# An instruction set, as Linux names it -> the precisions that kernels, or PyTorch's own, multiply in by it: x86's, and Arm's.
# AVX512-FP16 is not among them: its sums would be of float16 too, and no kernel of ours multiplies by it (ADR 90). _WHOLE_BYTES: 8 bits by
# 8 bits without saturating.
_WHOLE_BYTES = "whole bytes"
_MULTIPLIES: Mapping[str, tuple[str, ...]] = {
    "avx2": ("int8",),
    "avx_vnni": (_WHOLE_BYTES,),
    "avx512_vnni": (_WHOLE_BYTES,),
    "asimddp": (_WHOLE_BYTES, "int8"),
    "avx512_bf16": ("bf16",),
    "amx_bf16": ("bf16", "fp16"),
    "amx_fp16": ("fp16",),
    "amx_int8": (_WHOLE_BYTES,),
    "bf16": ("bf16",),
    "asimdhp": ("fp16",),
}


def lacking_instructions(precision: str, root: Path = Path("/")) -> tuple[str, ...]:
    """The instructions of which `precision`, "bf16", "fp16" or "int8", needs one, where this process may use none; else (). Without, it gains
    nothing."""
    import torch

    if precision == "int8" and torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return ()  # also where the system tells no flags
    return () if _multiplies(precision, root) else _instructions(precision)


def lacking_among(precision: str, features: Iterable[str]) -> tuple[str, ...]:
    """The instructions of which `precision` needs one, where a processor with `features`, by Linux's names, has none; else ()."""
    wanted = _instructions(precision)
    return () if set(features).intersection(wanted) else wanted


def weight_bits_of(features: Iterable[str]) -> int:
    """Like `default_weight_bits`, of a processor with `features`, by Linux's names."""
    return 7 if not lacking_among("int8", features) and lacking_among(_WHOLE_BYTES, features) else 8


def default_weight_bits(root: Path = Path("/")) -> int:
    """Bits of the quantized weights that the host multiplies fastest: 7 where it has AVX2 and neither VNNI nor AMX, else 8.

    x86's older product of bytes (`vpmaddubsw`) adds two products in 16 bits. With 8 bits on either side their sum saturates.
    """
    return 7 if _multiplies("int8", root) and not _multiplies(_WHOLE_BYTES, root) else 8


def _instructions(precision: str) -> tuple[str, ...]:
    return tuple(name for name, precisions in _MULTIPLIES.items() if precision in precisions)


def _multiplies(precision: str, root: Path) -> bool:
    """True if the host has an instruction for a precision. Those of AMX do not count where the system refuses its tiles; it is asked only where
    nothing else is there."""
    found = _used_flags(root).intersection(_instructions(precision))
    return bool(found) and (not all(map(is_of_tiles, found)) or may_use_tiles())


def flags(root: Path) -> frozenset[str]:
    """Linux's names of what a processor can do, as `proc/cpuinfo` below `root` tells them; none where it is absent. For this machine those that
    CPUID confirms (csrc/include/processor.h): an emulator runs programs beside the file of its host."""
    runtime = _runtime() if root == Path("/") else None
    if runtime is not None:
        return frozenset(runtime.features())
    try:
        fields = cpuinfo(root)
    except failures(OSError):
        return frozenset()
    return frozenset((fields.get("flags") or fields.get("features") or "").split())


def _used_flags(root: Path) -> set[str]:
    """Linux's names of the host's instructions, as far as PyTorch uses them."""
    import torch

    return set(flags_within(flags(root), torch.backends.cpu.get_cpu_capability()))


def flags_within(flags: Iterable[str], capability: str) -> tuple[str, ...]:
    """Those of Linux's `flags` that PyTorch uses. PyTorch may be held to AVX2 (`torch.backends.cpu.get_cpu_capability()`), and our kernels
    with it."""
    return tuple(flag for flag in flags if capability != "AVX2" or not (flag.startswith("avx512") or is_of_tiles(flag)))


def is_of_tiles(flag: str) -> bool:
    """True if Linux's name of an instruction set is one of AMX's."""
    return flag.startswith("amx")


def cpuinfo(root: Path) -> Mapping[str, str]:
    """Linux's description of the first processor (`proc/cpuinfo` below `root`), names in lower case. Raises OSError where it says nothing."""
    text = (root / "proc/cpuinfo").read_text(errors="replace")
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip().lower()] = value.strip()
    return fields
