from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from torch_hybrid_backend.engines.cpu import target as target_module
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.errors import ConfigError

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
stepping\t: 7
flags\t\t: fpu sse sse4_1 sse4_2 avx avx2 fma bmi1 bmi2 abm {more}

processor\t: 1
flags\t\t: fpu
"""
ARM = """processor\t: 0
Features\t: fp asimd asimddp bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def machine(root: Path, cpuinfo: str, threads_per_core: int = 1) -> Path:
    """A file system with what Linux says about a processor with 48 KiB of level 1 and 2 MiB of level 2 data cache."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(cpuinfo)
    cpus = root / "sys/devices/system/cpu"
    for i, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"))
    ):
        folder = cpus / f"cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    for order, number in enumerate(sorted(os.sched_getaffinity(0))):
        topology = cpus / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{order // threads_per_core}\n")
    return root


def test_x86_with_avx512(tmp_path: Path) -> None:
    """AVX-512 means 16 lanes; caches and the first processor's flags are read; irrelevant flags are left out."""
    target = Target.host(machine(tmp_path, X86.format(more="avx512f avx512_vnni")))
    assert target.lanes == 16
    assert {"avx2", "avx512f", "avx512_vnni", "fma"} <= set(target.features)
    assert "fpu" not in target.features
    assert (target.l1_bytes, target.l2_bytes) == (48 << 10, 2 << 20)
    assert target.mcpu == "native"


def test_arm(tmp_path: Path) -> None:
    """NEON has 4 lanes, and Arm's spelling of the fields is understood."""
    target = Target.host(machine(tmp_path, ARM))
    assert target.lanes == 4
    assert target.features == ("asimd", "asimddp", "bf16")
    assert "0xd40" in target.cpu


def test_hyperthreads_are_one_core(tmp_path: Path) -> None:
    """Two hardware threads of one core count once."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    one = Target.host(machine(tmp_path / "one", X86.format(more=""), threads_per_core=1))
    two = Target.host(machine(tmp_path / "two", X86.format(more=""), threads_per_core=2))
    assert two.cores == -(-one.cores // 2)


def test_without_proc_and_sys(tmp_path: Path) -> None:
    """A usable target comes out where the operating system tells nothing."""
    target = Target.host(tmp_path)
    assert target.lanes in (4, 8, 16)
    assert target.cores >= 1
    assert target.l1_bytes >= 16 << 10
    assert target.l2_bytes > target.l1_bytes


def test_host_does_not_import_tvm() -> None:
    """Looking at the machine needs neither TVM nor (on Linux) torch."""
    code = (
        "import sys; from torch_hybrid_backend.engines.cpu.target import Target; Target.host();"
        "assert not {'tvm', 'tvm_ffi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_amx_takes_permission(tmp_path: Path) -> None:
    """A target has no tiles where Linux refuses them to the process, and so other keys; one without AMX does not ask."""
    has = Target.host(machine(tmp_path / "has", X86.format(more="avx512f amx_bf16 amx_int8 amx_tile")))
    assert {"amx_bf16", "amx_int8", "amx_tile"} <= set(has.features)
    assert has.permitted(lambda: True) is has
    refused = has.permitted(lambda: False)
    assert refused.features == tuple(name for name in has.features if not name.startswith("amx"))
    assert refused.fingerprint != has.fingerprint
    without = Target.host(machine(tmp_path / "without", X86.format(more="avx512f")))
    assert without.permitted(lambda: pytest.fail("there is nothing to ask for")) is without


def test_features_of_this_machine_are_those_that_cpuid_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an emulator /proc/cpuinfo is the host's; kernels are for the processor that is emulated."""
    monkeypatch.setattr(target_module, "flags", lambda root: frozenset({"avx2", "amx_fp16", "fpu"}))
    assert Target.host().features == ("amx_fp16", "avx2")


def test_fingerprint_covers_every_field() -> None:
    """Any field that differs gives another fingerprint; equal targets, also across a pickle, give the same."""
    target = Target.host()
    assert pickle.loads(pickle.dumps(target)).fingerprint == target.fingerprint
    for field in dataclasses.fields(Target):
        value = getattr(target, field.name)
        other = value + 1 if isinstance(value, int) else (*value, "x") if isinstance(value, tuple) else value + "x"
        assert dataclasses.replace(target, **{field.name: other}).fingerprint != target.fingerprint, field.name


def test_a_hidden_extension_changes_the_fingerprint(tmp_path: Path) -> None:
    """Two machines of one model whose flags differ, even in one that kernels do not care for, share no kernels."""
    one = Target.host(machine(tmp_path / "one", X86.format(more="clwb")))
    two = Target.host(machine(tmp_path / "two", X86.format(more="")))
    assert one.features == two.features
    assert one.fingerprint != two.fingerprint


def test_tvm_target_has_no_hidden_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extensions that LLVM assumes of the model but the machine does not show are off; what it shows beyond that is on."""
    pytest.importorskip("tvm")
    from tvm.target import codegen

    monkeypatch.setattr(target_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "skylake-avx512")
    target = dataclasses.replace(Target.host(), features=("avx", "avx2", "fma", "gfni", "sse4_1", "sse4_2"), cores=3)
    made = tvm_target(target)
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(made)}
    assert "avx2" in features
    assert "gfni" in features
    assert not any(feature.startswith("avx512") for feature in features)
    assert int(made.attrs["num-cores"]) == 3


def test_tvm_target_of_an_arm_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM gets the features that Linux shows, by name, and no model: models of Arm processors have SVE, which the system may hide."""
    pytest.importorskip("tvm")
    monkeypatch.setattr(target_module.platform, "machine", lambda: "aarch64")
    made = tvm_target(Target.host(machine(tmp_path, ARM)))
    assert (made.attrs["mcpu"], made.attrs["mtriple"]) == ("generic", "aarch64-linux-gnu")
    assert [*made.attrs["mattr"]] == ["+neon", "+dotprod", "+bf16"]


def test_tiles_tell_of_a_newer_processor_than_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may show a number whose model had no AMX: LLVM then tunes for one that had."""
    pytest.importorskip("tvm")
    from tvm.target import codegen

    monkeypatch.setattr(target_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "rocketlake")
    flags = ("amx_bf16", "amx_tile", "avx2", "avx512f", "fma")
    made = tvm_target(dataclasses.replace(Target.host(), features=flags))
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(made)}
    assert made.attrs["mcpu"] == "sapphirerapids"
    assert "amx-tile" in features
    assert "amx-int8" not in features
    older = tvm_target(dataclasses.replace(Target.host(), features=flags[2:]))
    assert older.attrs["mcpu"] == "rocketlake"


def test_tvm_target_of_a_named_cpu() -> None:
    """A name other than "native" is handed to LLVM as it is."""
    pytest.importorskip("tvm")
    assert tvm_target(dataclasses.replace(Target.host(), mcpu="x86-64-v3")).attrs["mcpu"] == "x86-64-v3"


def test_vectors_are_no_wider_than_pytorchs(tmp_path: Path) -> None:
    """Held to AVX2, a processor with AVX-512 is compiled for without it, and its kernels are others; what has none stays as it is."""
    wide = Target.host(machine(tmp_path / "wide", X86.format(more="avx512f avx512vl avx512_vnni amx_tile avx_vnni")))
    narrow = Target.host(machine(tmp_path / "narrow", X86.format(more="avx_vnni")))
    held = wide.within("AVX2")
    assert (wide.lanes, held.lanes, held.features) == (16, 8, narrow.features)
    assert held.fingerprint != wide.fingerprint
    assert wide.within("AVX512") == wide
    assert narrow.within("AVX2") == narrow


@pytest.mark.skipif(Target.host().lanes < 16, reason="needs AVX-512")
def test_kernels_of_a_process_held_to_avx2_have_no_wider_vectors() -> None:
    """ATEN_CPU_CAPABILITY=avx2 holds the kernels as it holds PyTorch's own: LLVM is told so."""
    from tvm.target import codegen

    target = Target.host().within("AVX2")
    used = {str(feature) for feature in codegen.llvm_get_cpu_features(tvm_target(target))}
    assert "avx2" in used
    assert not any(feature.startswith("avx512") for feature in used)


def test_a_named_target_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key has nothing of the machine in it, and its features are those that LLVM gives the name."""
    monkeypatch.setattr(target_module, "_cpu_and_flags", None)
    monkeypatch.setattr(target_module, "_cores", None)
    monkeypatch.setattr(target_module, "_cache_bytes", None)
    lanes = {"x86-64-v2": 4, "x86-64-v3": 8, "x86-64-v4": 16}
    for name, wide in lanes.items():
        target = Target.named(name)
        assert target.lanes == wide
        assert features_in_llvm({"mcpu": name}) == list(target.features)
    assert len({Target.named(name).fingerprint for name in lanes}) == len(lanes)


def features_in_llvm(named: Mapping[str, object]) -> list[str]:
    """The features that LLVM takes a processor to have, of those that kernels use, by Linux's names; asked in a process of its own."""
    code = f"""
from torch_hybrid_backend.engines.cpu.isa import ARCHITECTURES
from torch_hybrid_backend.engines.cpu.target import Target, _llvm_features
named = {named!r}
used = _llvm_features({{"kind": "llvm", **named}})
known = ARCHITECTURES[named.get("mtriple", "x86_64").partition("-")[0]].features
print(*sorted(linux for llvm, linux in known.items() if llvm in used))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", ["cortex-a72", "neoverse-n1", "neoverse-v1"])
def test_an_arm_processor_has_the_features_that_llvm_gives_it(name: str) -> None:
    """All of them are those that kernels use."""
    target = Target.named(name)
    assert (target.lanes, target.isa.registers) == (4, 32)
    assert list(target.features) == features_in_llvm({"mtriple": "aarch64-linux-gnu", "mcpu": name})


def test_targets_of_equal_features_are_equal() -> None:
    """A key has features alone: whoever writes them otherwise finds the same kernels."""
    assert Target.named("cortex-a72") == Target.named("armv8-a") == Target.named("aarch64-linux-gnu")
    assert Target.named("aarch64-unknown-linux-gnu, +dotprod,+fullfp16") == Target.named("neoverse-n1")
    assert Target.named("x86-64-v4,+avx512vnni").isa.dot_products >= {"vpdpbusd"}
    assert Target.named("armv8-a,+dotprod").fingerprint != Target.named("armv8-a").fingerprint
    assert Target.named("x86_64-linux-gnu").features == ()
    assert Target.named("riscv64-linux-gnu,+v") == Target.named("rv64gcv") == Target.named("rv64gc,+v")


def test_llvm_gets_no_feature_that_a_target_does_not_name() -> None:
    """Machine code for Neoverse V1, which has SVE, has none of it."""
    made = tvm_target(Target.named("neoverse-v1"))
    assert "-misched-cluster:bool=false" in made.attrs["cl-opt"]
    assert sorted(made.attrs["mattr"]) == ["+bf16", "+dotprod", "+fullfp16", "+i8mm", "+neon"]
    assert made.attrs["mtriple"] == "aarch64-linux-gnu"
    assert features_in_llvm({key: made.attrs[key] for key in ("mtriple", "mcpu")}) == ["asimd"]


def test_a_target_of_riscv() -> None:
    """Vectors of 128 bits, which every processor with V has; numbers are passed in registers of float64."""
    made, isa = tvm_target(Target.named("rv64gcv")), Target.named("rv64gcv").isa
    assert (isa.lanes, isa.registers, isa.computes_float16) == (4, 32, True)
    assert (made.attrs["mtriple"], made.attrs["mabi"]) == ("riscv64-linux-gnu", "lp64d")
    assert sorted(made.attrs["mattr"]) == ["+a", "+c", "+d", "+f", "+m", "+v"]
    assert features_in_llvm({key: made.attrs[key] for key in ("mtriple", "mcpu", "mattr", "mabi")}) == [*"acdfmv"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "neoverse-n7",
            r"no target is called 'neoverse-n7'; there are native, x86-64-v2, .*'armv8-a,\+dotprod'.*mean 'neoverse-",
        ),
        ("riscv64", "no target is called 'riscv64'.*mean 'riscv64-linux-gnu'"),
        ("rv64gcv,+zvfh", r"'\+zvfh' is no feature that kernels of riscv64 use; .* of a, c, d, f, m, v"),
        ("rv64gcv,+sve", r"'\+sve' is no feature that kernels of riscv64 use"),
        ("aarch64-apple-darwin", "no target is called 'aarch64-apple-darwin'"),
        (
            "armv8-a,+dotprods",
            r"'\+dotprods' is no feature that kernels of aarch64 use.*neon, dotprod.*mean '\+dotprod'",
        ),
        ("armv8-a,dotprod", r"features are written as '\+NAME'.*mean '\+dotprod'"),
        ("x86-64-v3,+dotprod", "no feature that kernels of x86_64 use"),
        ("neoverse-v1,+sve", "no kernel uses sve: its vectors have a length that only the processor knows"),
        ("native,+avx2", "features cannot follow native"),
        ("armv8-a,+asimddp", r"mean '\+dotprod'"),
        ("+dotprod", "features stand behind the name of a processor"),
        ("-neon", "none can be taken away: name a processor without it"),
    ],
)
def test_a_target_that_does_not_exist(name: str, told: str) -> None:
    """The error has the names that there are, and the nearest; SVE is refused with the reason."""
    with pytest.raises(ConfigError, match=rf"HYBRID_TARGET.*{told}"):
        Target.named(name)


def test_several_targets() -> None:
    """Commas separate targets as they separate features; what is one target counts once, by its first name. Only files are for several."""
    assert Target.names("native") == ["native"]
    assert Target.names("x86-64-v2,x86-64-v4,+avx512vnni,armv8-a") == ["x86-64-v2", "x86-64-v4,+avx512vnni", "armv8-a"]
    assert Target.names("armv8-a,native,cortex-a72,native") == ["armv8-a", "native"]
    with pytest.raises(ConfigError, match=r"no target is called 'dotprod'.*Did you mean '\+dotprod'"):
        Target.names("x86-64-v3,dotprod")
    for setting in ("x86-64-v3,+fma,x86-64-v4", "native,x86-64-v4", "x86-64-v3,native", "armv8-a,x86_64-linux-gnu"):
        with pytest.raises(ConfigError, match=r"only files are for several targets.*name one of [\w-]+ and [\w-]+$"):
            Target.named(setting)


def test_a_foreign_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine runs a stand-in, the same on all machines of its kind; on the target's own machine there is none."""
    monkeypatch.setattr(target_module.platform, "machine", lambda: "x86_64")
    target = Target.named("neoverse-n1")
    assert (target.is_foreign, target.here) == (True, Target.named("x86-64-v3"))
    assert target.label == "aarch64 asimd asimddp asimdhp"
    assert Target.named("x86-64-v4").here == Target.named("x86-64-v4")
    monkeypatch.setattr(target_module.platform, "machine", lambda: "aarch64")
    assert (target.is_foreign, target.here) == (False, target)


def test_kernels_of_a_foreign_target_are_not_those_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for another architecture is a library of its stand-in: what a machine of that architecture compiles has another key."""
    here = Target.named("neoverse-n1").fingerprint
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert Target.named("neoverse-n1").fingerprint != here
