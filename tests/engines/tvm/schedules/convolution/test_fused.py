"""Chains of convolutions: which are made, and their results against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, run_kernel
from tests.engines.tvm.schedules.convolution.test_direct import Case, make
from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.variants import variants
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.tvm.backend import TvmBackend
from torch_hybrid_backend.engines.tvm.cpu.alternatives import alternatives
from torch_hybrid_backend.engines.tvm.cpu.convolution_fusion import chain, join_chains
from torch_hybrid_backend.engines.tvm.cpu.kernels import FusedConvKernel, PackedConvKernel
from torch_hybrid_backend.engines.tvm.cpu.tiles import strips
from torch_hybrid_backend.engines.tvm.schedules.convolution import fused
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.ir import Buffer, Load
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import partition_graph

# Its caches hold 32 KB: what follows is large beside them, its weights are not.
SMALL = dataclasses.replace(HOST, cores=2, l2_bytes=64 << 10)


def depthwise(channels: int, size: tuple[int, int], kernel: int = 3, stride: int = 1, **more: int) -> Case:
    """A depthwise convolution that keeps the size but for the stride."""
    x = (more.pop("images", 1), channels, *size)
    return Case(x, channels, (kernel, kernel), stride, kernel // 2, groups=channels, **more)  # type: ignore[arg-type]


def make_stages(
    cases: list[Case], target: Target
) -> tuple[list[PackedConvKernel], dict[Buffer, torch.Tensor], torch.Tensor]:
    """(kernels, inputs, result in float64) of convolutions each of which reads what the one before it writes."""
    stages: list[PackedConvKernel] = []
    inputs: dict[Buffer, torch.Tensor] = {}
    want: torch.Tensor | None = None
    for case in cases:
        kernel, own, want = make(case, target, want)
        assert isinstance(kernel.x, Load)
        if stages:
            before, x = stages[-1].writes[0], kernel.x
            del own[x.buffer]
            reads = (before, *(read for read in kernel.reads if read.buffer is not x.buffer))
            kernel = dataclasses.replace(kernel, x=Load(x.dtype, before.buffer, x.index), reads=reads)
        stages.append(kernel)
        inputs.update(own)
    assert want is not None
    return stages, inputs, want


INVERTED = [Case((1, 8, 40, 60), 32, (1, 1)), depthwise(32, (40, 60), stride=2), Case((1, 32, 20, 30), 12, (1, 1))]


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "cases",
    [
        INVERTED,
        [Case((2, 19, 13, 17), 37, (1, 1)), depthwise(37, (13, 17), 5, images=2)],
        [Case((1, 3, 23, 31), 32, (3, 3), 2, 1, blocked_x=False), depthwise(32, (12, 16), images=1)],
        [depthwise(7, (1, 5)), Case((1, 7, 1, 5), 3, (1, 1), long_epilogue=True)],
        [Case((3, 5, 2, 3), 18, (1, 1)), depthwise(18, (2, 3), 5, 2, images=3), Case((3, 18, 1, 2), 5, (1, 1))],
        [Case((1, 8, 15, 9), 16, (1, 1)), depthwise(16, (15, 9), dilation=2)],
        [depthwise(33, (11, 7), 3, 3), depthwise(33, (4, 3), 7), Case((1, 33, 4, 3), 1, (1, 1))],
    ],
    ids=["inverted", "five", "stem", "one row", "clipped", "dilated", "two depthwise"],
)
def test_a_chain_computes_what_its_convolutions_do(cases: list[Case], target: Target) -> None:
    """Against float64, with sizes that no block divides, strips of unequal height, padding wider than the image."""
    stages, inputs, want = make_stages(cases, target)
    (got,) = run_kernel(chain(stages), fused.emit, inputs, target)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_any_number_of_strips(cores: int) -> None:
    """Neighbouring strips compute the rows they share, also where there are more cores than rows."""
    target = dataclasses.replace(HOST, cores=cores)
    stages, inputs, want = make_stages([Case((1, 4, 7, 5), 9, (1, 1)), depthwise(9, (7, 5))], target)
    (got,) = run_kernel(chain(stages), fused.emit, inputs, target)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("images", "rows", "cores", "count"), [(1, 56, 2, 2), (1, 3, 8, 3), (2, 56, 8, 4), (8, 56, 2, 1), (3, 56, 2, 2)]
)
def test_strips_are_the_fewest_that_keep_all_cores_busy(images: int, rows: int, cores: int, count: int) -> None:
    """Each strip repeats rows of its neighbour."""
    assert strips(images, rows, dataclasses.replace(HOST, cores=cores)) == count


def joined(kernels: list[PackedConvKernel], outputs: list[Buffer], target: Target = SMALL) -> list[int]:
    """How many convolutions each kernel holds."""
    found: tuple[Kernel, ...] = join_chains(kernels, outputs, target)
    return [len(kernel.stages) if isinstance(kernel, FusedConvKernel) else 1 for kernel in found]


def test_an_inverted_residual_block_is_one_kernel() -> None:
    """Expansion, depthwise convolution and projection; with the chain's own convolutions as the other way of computing it."""
    stages, _, _ = make_stages(INVERTED, SMALL)
    (kernel,) = join_chains(stages, [stages[-1].writes[0].buffer], SMALL)
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
