"""Functions as kernels of the Triton engine, run by the interpreter with the tiles of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton import compiler
from torch_hybrid_backend.engines.triton import engine as triton_engine
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, MatMulKernel
from torch_hybrid_backend.partition.regions import partition_graph

HOPPER = Target(90, 4, is_interpreted=True)


def sampled(names: Iterable[str], default: Collection[str]) -> list[ParameterSet]:
    """Parameters of a test, all of them in test-full, those of `default` always."""
    return [pytest.param(name, marks=() if name in default else pytest.mark.full) for name in names]


def interpret_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="hybrid"` has this engine only, with the programs for `target` interpreted; what fails raises."""
    monkeypatch.setattr(triton_engine, "INTERPRETER", target)
    monkeypatch.setattr(session, "_sessions", {})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, value in (("ENGINES", "triton"), ("STRICT", "1"), ("PLACEMENT", "estimate")):
        monkeypatch.setenv(f"HYBRID_{name}", value)


def kernels_of(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, target: Target = HOPPER
) -> tuple[Kernel, ...]:
    """The kernels of the function's one region for `target`; nothing is compiled and no input is read."""
    backend = TritonBackend(target)
    engine = KernelEngine(backend, Config(), services())
    (segment,) = partition_graph(trace(function, *inputs), [engine], Config()).graph.segments
    return assemble(segment.region, backend).kernels


def compiled(
    folder: Path,
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    target: Target = HOPPER,
    operators: bool = False,
) -> tuple[KernelRegion, list[torch.Tensor]]:
    """The function's one region, compiled for `target`, and what it takes of the inputs; `operators`: with ATen's where it may."""
    config = dataclasses.replace(Config(), placement="estimate")
    engine = KernelEngine(TritonBackend(target, operators=operators), config, services(folder))
    graph = partition_graph(trace(function, *inputs), [engine], config).graph
    (segment,) = graph.segments
    (region,) = engine.compile([segment.region], Deadline(300.0))
    assert isinstance(region, KernelRegion), region
    return region, [inputs[graph.inputs.index(name)] for name in segment.inputs]


def program_of(
    folder: Path, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, tiling: Tiling
) -> tuple[Program, list[torch.Tensor]]:
    """The function's one region as a program, its matrix products cut up as `tiling` says, and what it takes of the inputs."""
    graph = partition_graph(
        trace(function, *inputs), [KernelEngine(TritonBackend(HOPPER), Config(), services())], Config()
    ).graph
    (segment,) = graph.segments
    region = assemble(segment.region, TritonBackend(HOPPER))
    ways = [Variant("", tiled(k, tiling) if isinstance(k, MatMulKernel) else (k,)) for k in region.kernels]
    chosen = region.with_variants(ways)
    artifacts = []
    for number, kernel in enumerate(chosen.kernels):
        job = Job(f"key_{number}", f"kernel_{number}", kernel, HOPPER, str(folder / f"{number}.kernel"))
        compiler.compile_kernel(job)
        artifacts.append(Artifact(job.output, job.symbol, job.key))
    return chosen.program(artifacts), [inputs[graph.inputs.index(name)] for name in segment.inputs]


def kernel_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Kernel:
    """The one kernel of the function's one region."""
    (kernel,) = kernels_of(function, *inputs)
    return kernel


def check(
    folder: Path,
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    target: Target = HOPPER,
    kinds: tuple[type[Kernel], ...] = (),
    tolerance: float = 2e-5,
) -> None:
    """The function's results are float64's, or near them; with `kinds` its kernels are of these."""
    region, taken = compiled(folder, function, *inputs, target=target)
    if kinds:
        assert tuple(type(kernel) for kernel in region.kernels.kernels) == kinds
    (got,) = region(taken)
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    if any(x.dtype in (torch.float16, torch.bfloat16) for x in inputs):
        tolerance = 2e-2
    torch.testing.assert_close(got.to(exact.dtype), exact, rtol=tolerance, atol=tolerance, equal_nan=True)
