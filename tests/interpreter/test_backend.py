"""A second backend through everything that engines share: capture, partition, assembly, keys, cache, workers, placement and the C++ plan."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import same

import torch_hybrid_backend
from benchmarks.models import ZOO, tensors
from tests.codegen import faulty_compiler
from tests.engines.cpu.kernels_for_tests import conv_kernel, row_sum_kernel, scale_kernel
from tests.interpreter import compiler as interpreter_compiler
from tests.interpreter.backend import InterpreterBackend
from tests.interpreter.compiler import Interpreter
from tests.operators.execution import Bench
from tests.operators.selection import SELECTION, check
from torch_hybrid_backend.codegen import kernel_cache
from torch_hybrid_backend.codegen.engine import shared_compiler
from torch_hybrid_backend.codegen.kernel_cache import Artifact, compile_kernels
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.storage.store import Store

# Convolutions, causal attention, norms, embeddings. TVM's kernels are tested with every model.
_MODELS = ("unet", "gpt2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _MODELS else pytest.mark.full) for name in ZOO]
)
def test_models_equal_eager(name: str, interpreter: None) -> None:
    """The first call and the second, on other inputs, give eager's results or are as near to float64's; no region falls back."""
    entry = ZOO[name]
    model = entry.build("small")
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        for seed in (1, 2):
            inputs = entry.inputs("small", 1, seed=seed)
            wide = exact(*(value.double() if value.is_floating_point() else value for value in inputs))
            assert same(tensors(model(*inputs)), tensors(compiled(*inputs)), tensors(wide))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path: Path = tmp_path_factory.mktemp("kernels")
    return Bench(path, compilers=2, modes=("interpreter",))


# TVM's tests run every kind through lowerings, fusion and the plan.
_KINDS = ("float32",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in _KINDS else pytest.mark.full) for kind in SELECTION]
)
def test_operators_equal_eager(kind: str, bench: Bench) -> None:
    """The operators and modules that TVM's kernels are tested with: each has a few samples, forced through the interpreter's kernels."""
    check(kind, bench)


def test_it_runs_what_it_says(interpreter: None) -> None:
    """The plan tells that the interpreter runs the region, by its kernels; two results of one kernel are two calls."""

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.softmax(x, -1)
        return y, y.sum(-1)

    x = torch.randn(5, 7)
    plan = torch_hybrid_backend.explain(two, x).plans[0]
    assert {region.engine for region in plan.regions} == {"interpreter"}
    called = [title for region in plan.regions for title in region.operators]
    assert len(called) == 2
    assert all("RowKernel, interpreted" in title for title in called)
    torch.testing.assert_close(torch.compile(two, backend="hybrid")(x), two(x))


def test_measured_placement(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed against eager, it loses; results are eager's all the same."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    x = torch.randn(64, 64)
    compiled = torch.compile(lambda x: torch.tanh(x @ x).sum(0), backend="hybrid")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), torch.tanh(x @ x).sum(0), rtol=1e-4, atol=1e-4)


def test_changed_weights_are_seen(interpreter: None) -> None:
    """Constants are read as they are in each call."""
    layer = torch.nn.Linear(5, 3)
    compiled, x = torch.compile(layer, backend="hybrid"), torch.randn(4, 5)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), layer(x))
            layer.weight.mul_(2)


def test_what_it_cannot_run_falls_back(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes known only at run time: its compiler refuses them in the worker process, and eager runs the region, whatever they are."""
    monkeypatch.setenv("HYBRID_STRICT", "0")
    compiled = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="hybrid", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1) * 2)
    plan = torch_hybrid_backend.explain(compiled, torch.randn(4, 7)).plans[0]
    assert {region.engine for region in plan.regions} == {"eager"}
    assert "LoopVar" not in str(plan)


def test_what_failed_within_a_day_is_one_line_in_the_plan(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two models with a kernel that cannot be compiled: it is tried once, eager runs both, and the second plan says when it failed."""
    monkeypatch.setenv("HYBRID_STRICT", "0")
    monkeypatch.setenv("FAULTY_COMPILER", str(tmp_path))
    monkeypatch.setattr(InterpreterBackend, "compiler", faulty_compiler)
    (tmp_path / "fault").write_text("fails")
    x = torch.randn(5, 7)
    plans = [torch_hybrid_backend.explain(lambda x: torch.softmax(x, -1), x).plans[0] for _ in range(2)]
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    for plan in plans:
        (region,) = plan.regions
        assert region.engine == "eager"
        (refusal,) = region.refusals
        assert refusal.code is Reason.COMPILE_FAILED
        assert "no registers are left" in refusal.why
    (line,) = [line for line in str(plan).splitlines() if "--forget-failures" in line]
    assert "no registers are left" in line
    assert "--forget-failures" not in str(plans[0])
    shared_compiler(faulty_compiler, Config().compile_threads).close()


def test_artifacts_are_kept_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process writes JSON; the store keeps it under the key of the kernel, and a later process finds it there."""
    compiler, store = KernelCompiler(interpreter_compiler, threads=1), Store(tmp_path)
    (made,) = compile_kernels([scale_kernel()], Interpreter(), compiler, store, 60)
    assert isinstance(made, Artifact)
    assert made.key == kernel_key(scale_kernel(), Interpreter(), interpreter_compiler)
    assert json.loads(Path(made.path).read_text())["nodes"]
    monkeypatch.setattr(kernel_cache, "_memo", {})
    (process,) = compiler.process_ids()
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    compiler.close()
    assert compile_kernels([scale_kernel()], Interpreter(), compiler, store, 60) == [made]
    assert not compiler.process_ids()


def test_what_the_compiler_refuses(tmp_path: Path) -> None:
    """A worker's ScheduleError comes back as one; the kernels beside it are made."""
    compiler = KernelCompiler(interpreter_compiler, threads=1)
    refused, made = compile_kernels([conv_kernel(), row_sum_kernel()], Interpreter(), compiler, Store(tmp_path), 60)
    assert isinstance(refused, ScheduleError)
    assert "CpuConvKernel" in str(refused)
    assert isinstance(made, Artifact)


def test_compilers_have_keys_of_their_own() -> None:
    """A kernel for one target has a key, and for two targets two artifacts; an edit of the interpreter, outside the package, is another key
    too."""
    keys = {kernel_key(scale_kernel(), Interpreter(), module) for module in (interpreter_compiler, tir_compiler)}
    keys.add(kernel_key(scale_kernel(), dataclasses.replace(Interpreter(), fingerprint="another"), tir_compiler))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_compiler, "_OWN", "edited")
        keys.add(kernel_key(scale_kernel(), Interpreter(), interpreter_compiler))
    assert len(keys) == 4
