"""The TVM engine's `KernelBackend`."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported
from torch_hybrid_backend.engines.cpu import backend as backend_module
from torch_hybrid_backend.engines.cpu import target as target_module
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.errors import ConfigError
from torch_hybrid_backend.loops.index import LoopVar, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import Dim, symbol

_AVX512 = Target("x86-64-v4", "x", ("avx2", "avx512f"), 16, 2, 48 << 10, 1 << 20)


def test_the_target_is_what_pytorch_uses_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another one is given."""
    assert TvmBackend(_AVX512).target is _AVX512
    monkeypatch.setattr(Target, "host", lambda: _AVX512)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    narrow = TvmBackend()
    assert (narrow.target.lanes, narrow.device) == (8, CPU)
    assert narrow.target is narrow.target


def test_a_named_target_that_this_process_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing: of the processor, or of what PyTorch is held to."""
    features = Target.named("x86-64-v4").features
    has = dataclasses.replace(_AVX512, features=features)
    monkeypatch.setattr(Target, "host", lambda: has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert TvmBackend.for_setting("x86-64-v4").target == Target.named("x86-64-v4")
    assert TvmBackend.for_setting("native").target == has
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert TvmBackend.for_setting("x86-64-v3").target == Target.named("x86-64-v3")
    with pytest.raises(ConfigError, match=r"HYBRID_TARGET.*'x86-64-v4'.*lacks avx512bw, avx512cd.*'native'"):
        TvmBackend.for_setting("x86-64-v4")


def test_a_target_of_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are made where nothing times them, and this machine runs a stand-in; x86's instructions have no forms for other machines."""
    has = dataclasses.replace(_AVX512, features=Target.named("x86-64-v4").features)
    monkeypatch.setattr(Target, "host", lambda: has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(target_module.platform, "machine", lambda: "x86_64")
    assert TvmBackend.for_setting("neoverse-n1", times=False).target == Target.named("neoverse-n1")
    with pytest.raises(
        ConfigError,
        match=r"'neoverse-n1', and this machine \(x86_64\) cannot time its kernels: write a file .*'native'",
    ):
        TvmBackend.for_setting("neoverse-n1")
    monkeypatch.setattr(Target, "host", lambda: dataclasses.replace(has, features=("avx2",), lanes=8))
    with pytest.raises(ConfigError, match="cannot run its kernels: it lacks abm, avx, bmi1"):
        TvmBackend.for_setting("neoverse-n1", times=False)
    monkeypatch.setattr(target_module.platform, "machine", lambda: "aarch64")
    with pytest.raises(
        ConfigError,
        match="'x86-64-v3', and a machine with aarch64 makes no kernels of x86_64: use one with x86_64, or another target",
    ):
        TvmBackend.for_setting("x86-64-v3", times=False)


@pytest.mark.parametrize("permitted", [True, False])
def test_amx_where_the_process_may_use_it(monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    """The target, and with it every key, has AMX only where Linux lets this process have the tiles."""
    has = dataclasses.replace(_AVX512, features=("amx_bf16", "amx_tile", "avx512f"))
    monkeypatch.setattr(Target, "host", lambda: has)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(backend_module, "may_use_tiles", lambda: permitted)
    backend = TvmBackend()
    assert backend.target.features == (has.features if permitted else ("avx512f",))
    assert ("and AMX" in dict(backend.describe())["target"]) == permitted


def test_without_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal says what to install."""
    assert TvmBackend().available() == Supported()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = TvmBackend().available()
    assert isinstance(refused, Refused)
    assert refused.code == Reason.MISSING_DEPENDENCY
    assert "pip install 'apache-tvm" in refused.why


def test_what_doctor_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and sizes; what is missing is said, and what would do."""
    found = dict(TvmBackend(_AVX512).describe())
    assert TvmBackend(_AVX512).compiles()
    assert found["tvm"] == compiler.version()
    assert found["target"] == "x86-64-v4: 16 lanes of float32, 2 cores with 48 KiB and 1024 KiB of cache each"
    monkeypatch.setattr(backend_module, "find_linker", lambda: None)
    monkeypatch.setattr(compiler, "version", lambda: "")
    missing = dict(TvmBackend(_AVX512).describe())
    assert missing["tvm"] == "not installed"
    refused = TvmBackend(_AVX512).compiles()
    assert isinstance(refused, Refused)
    assert refused.why.startswith("no linker is on the PATH (none of ")
    assert missing["linker"].startswith("none, so no kernel can be compiled: ")
    assert "binutils" in missing["linker"]


def _no_memory(_: Dim) -> int:
    raise AssertionError("TVM's kernels ask for none")


def test_steps_call_the_kernel_with_its_sizes() -> None:
    """The artifact's function, the buffers' numbers, how many are written, then the sizes in the kernel's order."""
    step = TvmBackend(_AVX512).step(scale_kernel(), Artifact("a.so", "kernel_a", "key"), (4, 2), _no_memory)
    assert (step.library, step.symbol, step.arguments, step.writes, step.sizes) == ("a.so", "kernel_a", (4, 2), 1, ())
    n, m = symbol("n", 7), symbol("m", 9)
    x, out = (Argument(Buffer((n, m), "float32"), contiguous((n, m))) for _ in range(2))
    point = (var("i", n), var("j", m))
    stores = (Store(out.buffer, point, x.buffer.at(point)),)
    kernel = MapKernel((x,), (out,), (LoopVar("j", m), LoopVar("i", n)), stores)
    step = TvmBackend(_AVX512).step(kernel, Artifact("b.so", "kernel_b", "key"), (0, 1), _no_memory)
    assert step.sizes == (m, n)


def test_a_kernel_s_text_is_its_tir() -> None:
    """The text is that of the schedule that was compiled, under the name that the plan has."""
    backend, artifact = TvmBackend(_AVX512), Artifact("a.so", "map_mul_0123", "key")
    text = backend.text(scale_kernel(), artifact, backend.step(scale_kernel(), artifact, (0, 1), _no_memory))
    assert (text.name, text.suffix) == ("map_mul_0123", ".tir.py")
    assert "def map_mul_0123(" in text.text
    assert "T.vectorized(16)" in text.text
