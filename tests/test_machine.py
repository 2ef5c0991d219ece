"""The machine as texts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_hybrid_backend import machine
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.machine import (
    cpuinfo,
    default_weight_bits,
    fingerprint,
    lacking_instructions,
    most_threads,
    processor_quota,
    processors,
)


def _with_cpuinfo(root: Path, text: str) -> None:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)


def test_most_threads() -> None:
    """Every number up to the processors' is legal, and so is 256."""
    assert most_threads() >= max(256, processors())


def test_the_fingerprint_names_threads_and_versions() -> None:
    """Timings with another number of threads or another torch are other timings."""
    assert f"threads {torch.get_num_threads()}" in fingerprint(CPU)
    assert torch.__version__ in fingerprint(CPU)


def test_the_fingerprint_is_that_of_the_moment() -> None:
    """Threads or the precision of matrix products set anew make other timings."""
    before, threads = fingerprint(CPU), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert fingerprint(CPU) != before
    finally:
        torch.set_num_threads(threads)
    assert fingerprint(CPU) == before
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert fingerprint(CPU) != before
    finally:
        torch.set_float32_matmul_precision(precision)
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        assert fingerprint(CPU) != before


_BY_BACKEND = """
import torch
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.machine import fingerprint
before = fingerprint(CPU)
torch.backends.cuda.matmul.fp32_precision = "tf32"
assert fingerprint(CPU) == before
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
assert fingerprint(CPU) != before
x = torch.randn(8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(lambda x: (x @ x).relu(), backend="hybrid")(x), (x @ x).relu(), rtol=0.1, atol=0.1)
"""


def test_precisions_may_be_set_by_backend(tmp_path: Path) -> None:
    """Precisions are set as PyTorch advises; its older way of asking for them raises then, in a process of its own. Compiling does not."""
    environment = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _BY_BACKEND], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


class _Cuda:
    """Answers of torch.cuda about two GPUs; the second is a slice made by MIG."""

    names = ("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb")

    def get_device_name(self, index: int) -> str:
        return self.names[index]

    def get_device_properties(self, index: int) -> SimpleNamespace:
        count, memory = ((132, 141 << 30), (16, 16 << 30))[index]
        return SimpleNamespace(major=9, minor=0, multi_processor_count=count, total_memory=memory)


def test_the_fingerprint_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's, and name, capability, size, driver and the settings that choose its kernels. Stand-ins for torch.cuda and the driver: never
    run on a GPU."""
    monkeypatch.setattr(torch, "get_device_module", {"cuda": _Cuda()}.__getitem__)
    monkeypatch.setattr(machine, "_driver", lambda: "NVRM version: 580.1")
    whole, part = fingerprint(Device("cuda", 0)), fingerprint(Device("cuda", 1))
    assert whole.startswith(fingerprint(CPU) + "|cuda NVIDIA H200|capability 9.0 multiprocessors 132 memory")
    assert "NVRM version: 580.1" in whole
    assert "MIG 1g.18gb|capability 9.0 multiprocessors 16 memory" in part
    # Not through torch.backends.cudnn: torch.testing may have forbidden that to the process.
    matmul = functools.partial(setattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction")
    for change, other in (
        (matmul, False),
        (torch._C._set_cudnn_benchmark, True),
        (torch._C._set_cudnn_deterministic, True),
        (torch._C._set_sdp_use_flash, False),
        (torch._C._set_sdp_use_cudnn, False),
        (torch.use_deterministic_algorithms, True),
    ):
        change(other)
        try:
            assert fingerprint(Device("cuda", 0)) != whole
        finally:
            change(not other)
    assert fingerprint(Device("cuda", 0)) == whole


def test_the_fingerprint_tells_arm_processors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has no names for Arm's processors, but numbers: Neoverse N1 and V1 share no timings."""
    prints = set()
    for part in ("0xd0c", "0xd40"):
        machine.processor.cache_clear()
        monkeypatch.setattr(
            machine,
            "cpuinfo",
            lambda root, part=part: {"cpu implementer": "0x41", "cpu part": part, "cpu variant": "0x1"},
        )
        prints.add(fingerprint(CPU))
    machine.processor.cache_clear()
    assert len(prints) == 2


def test_cpuinfo_is_of_the_first_processor(tmp_path: Path) -> None:
    """Names in lower case; what later processors say is left out; a system without the file says so."""
    with pytest.raises(FileNotFoundError):
        cpuinfo(tmp_path)
    _with_cpuinfo(tmp_path, "processor : 0\nModel name\t: One: a\nrubbish\n\nprocessor : 1\nflags : x\n")
    assert cpuinfo(tmp_path) == {"processor": "0", "model name": "One: a"}


@pytest.mark.parametrize(
    ("cpuinfo_text", "bf16", "fp16"),
    [
        ("flags : avx2 avx512f avx512_bf16", True, False),
        ("flags : avx2 avx512f avx512_fp16", False, False),  # whose sums would be of float16
        ("flags : avx2 amx_tile amx_bf16", True, True),  # whose tiles multiply float16 as two bfloat16
        ("flags : avx512f avx512_fp16 amx_bf16 avx512_bf16", True, True),
        ("flags : avx2 fma", False, False),
        ("Features : asimd asimdhp bf16", True, True),
        ("", False, False),
    ],
)
def test_instructions_of_a_precision(
    cpuinfo_text: str, bf16: bool, fp16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor shows its instructions, x86's and Arm's; where it shows none, those that are lacking are named."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "may_use_tiles", lambda: True)
    _with_cpuinfo(tmp_path, cpuinfo_text)
    for precision, there in (("bf16", bf16), ("fp16", fp16)):
        lacking = lacking_instructions(precision, tmp_path)
        assert bool(lacking) is not there
        assert all(precision in name or name in ("asimdhp", "amx_bf16") for name in lacking)


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ("avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", True, False),
        ("avx512f amx_tile amx_bf16 amx_fp16", False, False),
    ],
)
def test_tiles_that_the_system_refuses_are_no_instructions(
    flags: str, bf16: bool, fp16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor has AMX, this process may not use it: what is left are the instructions on vectors."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "may_use_tiles", lambda: False)
    _with_cpuinfo(tmp_path, f"flags : {flags}")
    assert bool(lacking_instructions("bf16", tmp_path)) is not bf16
    assert bool(lacking_instructions("fp16", tmp_path)) is not fp16
    assert default_weight_bits(tmp_path) == 8


@pytest.mark.parametrize(
    ("cpuinfo_text", "capability", "there"),
    [
        ("flags : sse4_2 avx", "DEFAULT", False),
        ("flags : avx2", "AVX2", True),
        ("flags : avx2 avx512f avx512_vnni", "AVX512", True),
        ("Features : asimd asimddp i8mm", "DEFAULT", True),
        ("", "AVX2", True),  # the system tells nothing, PyTorch does
        ("", "DEFAULT", False),
    ],
)
def test_instructions_of_integers(
    cpuinfo_text: str, capability: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of bytes need vectors of at least 8 lanes on x86, and FEAT_DotProd on Arm."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    _with_cpuinfo(tmp_path, cpuinfo_text)
    assert bool(lacking_instructions("int8", tmp_path)) is not there


@pytest.mark.parametrize(
    ("flags", "capability", "bits"),
    [
        ("avx2", "AVX2", 7),
        ("avx2 avx512f", "AVX512", 7),
        ("avx2 avx512f avx512_vnni", "AVX512", 8),
        ("avx2 avx512f avx512_vnni", "AVX2", 7),
        ("avx2 avx_vnni", "AVX2", 8),
        ("avx2 amx_int8", "AVX512", 8),
        ("sse4_2", "DEFAULT", 8),
        ("asimd", "DEFAULT", 8),
        ("", "DEFAULT", 8),
    ],
)
def test_default_weight_bits(
    flags: str, capability: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 where products of bytes add two of them up in 16 bits, with what PyTorch uses of the processor; 8 wherever that would gain nothing."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(machine, "may_use_tiles", lambda: True)
    _with_cpuinfo(tmp_path, f"flags : {flags}")
    assert default_weight_bits(tmp_path) == bits
    assert default_weight_bits(tmp_path / "nowhere") == 8


def test_pytorch_held_to_avx2_has_no_wider_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATEN_CPU_CAPABILITY=avx2 holds kernels to that too; a machine that tells nothing has no instructions."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    _with_cpuinfo(tmp_path, "flags : avx2 avx512_bf16 amx_bf16")
    assert "avx512_bf16" in lacking_instructions("bf16", tmp_path)
    assert lacking_instructions("bf16", tmp_path / "nowhere")


def test_tiles_are_asked_for_where_the_system_has_them() -> None:
    """The system's answer is known for the rest of the process; a processor without AMX has nothing to permit."""
    answer = machine.may_use_tiles()
    assert machine.may_use_tiles() is answer
    if "amx_tile" not in cpuinfo(Path("/")).get("flags", "").split():
        assert answer is False


def test_flags_of_this_machine_are_in_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime removes what CPUID does not show; AMX-FP16 alone has no name in /proc/cpuinfo. Without the runtime the file's flags count."""
    told = set(cpuinfo(Path("/"))["flags"].split())
    assert "sse2" in machine.flags(Path("/"))
    assert machine.flags(Path("/")) - {"amx_fp16"} <= told
    monkeypatch.setattr(machine, "_runtime", lambda: SimpleNamespace(features=lambda: ["sse2"]))
    assert machine.flags(Path("/")) == {"sse2"}
    monkeypatch.setattr(machine, "_runtime", lambda: None)
    assert machine.flags(Path("/")) == told


def test_without_the_runtime_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the runtime has no tiles, as the runtime asks for them: where it was built for another Python, kernels do without."""
    monkeypatch.setitem(sys.modules, "torch_hybrid_backend._runtime", None)
    assert machine.may_use_tiles.__wrapped__() is False


_VERSION_1 = "29 28 0:25 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct"
_VERSION_2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("mount", "group", "files", "quota"),
    [
        (_VERSION_2.format(root="/"), "0::/", {}, None),
        (_VERSION_2.format(root="/"), "0::/", {"cpu.max": "max 100000"}, None),
        (_VERSION_2.format(root="/"), "0::/", {"cpu.max": "150000 100000"}, 1.5),
        (_VERSION_2.format(root="/"), "0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        (_VERSION_2.format(root="/"), "0::/a/b", {"a/b/cpu.max": "20000 10000", "a/cpu.max": "50000 10000"}, 2.0),
        (_VERSION_2.format(root="/.."), "0::/../other", {"cpu.max": "400000 100000"}, 4.0),
        (
            _VERSION_1.format(root="/"),
            "4:cpu,cpuacct:/",
            {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
            None,
        ),
        (
            _VERSION_1.format(root="/"),
            "4:cpu,cpuacct:/jobs",
            {"jobs/cpu.cfs_quota_us": "300000", "jobs/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        (
            _VERSION_1.format(root="/docker/1234"),
            "4:cpu,cpuacct:/docker/1234",
            {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (_VERSION_1.format(root="/"), "5:memory:/jobs", {"jobs/cpu.cfs_quota_us": "1"}, None),
    ],
)
def test_processor_quota(mount: str, group: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """The least that a group and those above it give, in either version of control groups; in a container too, whose mount begins at its
    own group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"22 1 254:1 / / rw,relatime - ext4 /dev/root rw\n{mount}\n")
    (tmp_path / "proc/self/cgroup").write_text(f"12:devices:/elsewhere\n{group}\n")
    top = tmp_path / mount.split()[4].lstrip("/")
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text + "\n")
    assert processor_quota(tmp_path) == quota


def test_no_control_groups(tmp_path: Path) -> None:
    """A system that tells nothing limits nothing."""
    assert processor_quota(tmp_path) is None


def _compile_threads(before: str) -> int:
    code = f"{before}\nfrom torch_hybrid_backend.config import Config\nprint(Config().compile_threads)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_compiler_processes_are_as_many_as_processors_that_may_be_used() -> None:
    """A process that is held to one processor starts one."""
    assert _compile_threads("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})") == 1


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu", os.W_OK), reason="no control groups of version 1 to write")
def test_compiler_processes_are_as_many_as_a_real_control_group_gives_time_for() -> None:
    """A group that may use half a processor: its processes start one compiler."""
    group = Path(f"/sys/fs/cgroup/cpu/hybrid-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("50000")
        assert _compile_threads(f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))") == 1
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text("100000")
        expected = machine.processors()
        assert _compile_threads(f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))") == expected
    finally:
        group.rmdir()
