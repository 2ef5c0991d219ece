"""Chains of convolutions: which are made."""

from __future__ import annotations

import dataclasses

import torch

from tests.engines.cpu.schedules.convolution.convolutions_for_tests import INVERTED, SMALL, Case, depthwise, make_stages
from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.variants import variants
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.convolution_fusion import fuse_convolutions
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, FusedConvKernel
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops.ir import Buffer, Load
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import partition_graph


def joined(kernels: list[CpuConvKernel[Panels]], outputs: list[Buffer], target: Target = SMALL) -> list[int]:
    """The number of convolutions of each kernel."""
    found: tuple[Kernel, ...] = fuse_convolutions(kernels, outputs, target)
    return [len(kernel.stages) if isinstance(kernel, FusedConvKernel) else 1 for kernel in found]


def test_an_inverted_residual_block_is_one_kernel() -> None:
    """Expansion, depthwise convolution and projection; with the chain's own convolutions as the other way of computing it."""
    stages, _, _ = make_stages(INVERTED, SMALL)
    (kernel,) = fuse_convolutions(stages, [stages[-1].writes[0].buffer], SMALL)
    assert isinstance(kernel, FusedConvKernel)
    assert kernel.stages == tuple(stages)
    inner = {stage.writes[0].buffer for stage in stages[:-1]}
    assert not inner & {argument.buffer for argument in (*kernel.reads, *kernel.writes)}
    assert [variant.kernels for variant in variants(kernel, alternatives(kernel, {}, SMALL))] == [
        (kernel,),
        tuple(stages),
    ]
    assert kernel.multiply_adds == sum(stage.multiply_adds for stage in stages)


def test_what_is_read_elsewhere_or_fits_the_caches_stays_apart() -> None:
    """A tensor that another kernel reads or the region gives back must exist; one that fits the caches may as well."""
    stages, _, _ = make_stages(INVERTED[:2], SMALL)
    between, last = (stage.writes[0].buffer for stage in stages)
    assert joined(stages, [last]) == [2]
    assert joined(stages, [last, between]) == [1, 1]
    other, _, _ = make_stages([Case(between.shape, 8, (1, 1))], SMALL)
    x = other[0].x
    assert isinstance(x, Load)
    reader = dataclasses.replace(
        other[0], x=Load(x.dtype, between, x.index), reads=(stages[0].writes[0], *other[0].reads[1:])
    )
    assert joined([*stages, reader], [last, reader.writes[0].buffer]) == [1, 1, 1]
    assert joined(stages, [last], dataclasses.replace(SMALL, l2_bytes=1 << 20)) == [1, 1]


def test_strips_that_would_repeat_much_stay_apart() -> None:
    """With 16 cores a strip would be three rows, which need five."""
    cases = [Case((1, 8, 40, 60), 32, (1, 1)), depthwise(32, (40, 60))]
    stages, _, _ = make_stages(cases, SMALL)
    assert joined(stages, [stages[-1].writes[0].buffer]) == [2]
    many = dataclasses.replace(SMALL, cores=16, l2_bytes=20 << 10)
    assert joined(stages, [stages[-1].writes[0].buffer], many) == [1, 1]


def test_a_region_has_its_blocks_joined() -> None:
    """From ATen to kernels: relu6(conv(x)), relu6(depthwise), projection with the residual."""

    def block(x: torch.Tensor, expand: torch.Tensor, deep: torch.Tensor, project: torch.Tensor) -> torch.Tensor:
        convolve = torch.ops.aten.convolution.default
        y = convolve(x, expand, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1).clamp(0, 6)
        y = convolve(y, deep, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 32).clamp(0, 6)
        return convolve(y, project, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1) + x

    shapes = ((1, 8, 40, 60), (32, 8, 1, 1), (32, 1, 3, 3), (8, 32, 1, 1))
    module = trace(block, *(torch.zeros(shape) for shape in shapes))
    for node in [node for node in module.graph.nodes if node.op == "placeholder"][1:]:
        node.meta["constant"] = True
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    kernels = assemble(segment.region, TvmBackend(SMALL)).kernels
    chains = [kernel for kernel in kernels if isinstance(kernel, FusedConvKernel)]
    assert [len(kernel.stages) for kernel in chains] == [3]
