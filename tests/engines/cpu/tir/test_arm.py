"""Dot products of AArch64: the instructions that were meant, without spills, and equal sums from the arithmetic in their place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.engines.cpu.arm_for_tests import OPTIONS, random_bytes
from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir import arm
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.partition.regions import partition_graph


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return nn.functional.conv2d(x, w, None, 1, 1)
    return nn.functional.conv2d(x.float() * 0.5, w.float() * 0.5, None, 1, 1)


def pointwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return nn.functional.conv2d(x, w)
    return nn.functional.conv2d(x.float() * 0.5, w.float() * 0.5)


def multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w) if x.is_floating_point() else torch._int_mm(x, w)


_SHAPES = {
    multiplied: ((56, 256), (256, 96)),
    convolved: ((1, 64, 14, 14), (64, 64, 3, 3)),
    pointwise: ((1, 64, 14, 14), (64, 64, 1, 1)),
}


def inner_loop(assembly: str, instruction: str) -> list[str]:
    """The lines of the block with the most of an instruction, up to the branch back: what a loop is followed by may be in its block."""
    blocks = re.split(r"^(?:\.?\w.*:.*|\tb\..*)$", assembly, flags=re.MULTILINE)
    return max(blocks, key=lambda block: len(re.findall(rf"\b{instruction}\b", block))).splitlines()


@pytest.mark.parametrize(
    ("name", "left", "function", "instruction"),
    [
        ("armv8-a", torch.float32, multiplied, "fmla"),
        ("armv8-a", torch.float32, convolved, "fmla"),
        ("neoverse-n1", torch.int8, multiplied, "sdot"),
        ("neoverse-n1", torch.uint8, convolved, "sdot"),
        ("neoverse-v1", torch.uint8, convolved, "usdot"),
        ("neoverse-v1", torch.int8, multiplied, "smmla"),
        ("neoverse-v1", torch.uint8, multiplied, "usmmla"),
        ("neoverse-v1", torch.bfloat16, convolved, "bfdot"),
        ("neoverse-v1", torch.bfloat16, multiplied, "bfmmla"),
        ("neoverse-v1", torch.uint8, pointwise, "usmmla"),
        ("neoverse-v1", torch.bfloat16, pointwise, "bfmmla"),
    ],
)
def test_inner_loops_spill_nothing(
    name: str, left: torch.dtype, function: Callable[..., torch.Tensor], instruction: str
) -> None:
    """At least twelve sums stay in registers."""
    target = Target.named(name)
    backend = TvmBackend(target)
    shapes = _SHAPES[function]
    right = left if left.is_floating_point else torch.int8
    inputs = [torch.zeros(shapes[0], dtype=left), torch.zeros(shapes[1], dtype=right)]
    engine = KernelEngine(backend, Config(compile_threads=1), services())
    (segment,) = partition_graph(trace(function, *inputs), [engine], Config()).graph.segments
    made = segment.region.inputs
    region = dataclasses.replace(segment.region, inputs=(made[0], dataclasses.replace(made[1], is_constant=True)))
    (kernel,) = [k for k in assemble(region, backend).kernels if isinstance(k, CpuMatMulKernel | CpuConvKernel)]
    built = build("kernel", emit_kernel(kernel, "kernel", target), tvm_target(target))
    loop = inner_loop(built.inspect_source("asm"), instruction)
    products = [line for line in loop if re.search(rf"\b{instruction}\b", line)]
    assert len(products) >= 12
    assert not [line for line in loop if re.search(r"\b[qv]\d+.*\[sp\b", line)]


class _Layer(nn.Module):
    """A convolution of integers of 8 bits, whose weights are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convolved(x, self.weight)


@pytest.mark.parametrize("name", ["neoverse-n1", "neoverse-v1"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_sums_are_exact(name: str, dtype: torch.dtype) -> None:
    """Extremes included: by the arithmetic in place of the instructions, in the loops and with the packing that the target has."""
    model, x = _Layer(), random_bytes((1, 8, 9, 9), dtype)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={**OPTIONS, "target": name})
        assert torch.equal(compiled(x), model(x))


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (nn.Linear(68, 40), [(13, 68)]),
        (nn.Linear(18, 5), [(2, 18)]),
        (nn.Conv2d(8, 20, 3, padding=1), [(1, 8, 9, 9)]),
        (nn.Conv2d(8, 24, 1), [(2, 8, 7, 7)]),
        (_Attention(), [(1, 2, 33, 16)] * 3),
    ],
)
def test_products_of_bfloat16(model: nn.Module, sizes: list[tuple[int, ...]]) -> None:
    """The arithmetic in place of the instructions is as near to the exact product as bfloat16's results are."""
    torch.manual_seed(0)
    model, inputs = model.bfloat16().eval(), [torch.randn(size).bfloat16() for size in sizes]
    with torch.no_grad():
        options = {**OPTIONS, "target": "neoverse-v1"}
        result = torch.compile(model, backend="hybrid", options=options, dynamic=False)(*inputs)
        exact = model.double()(*[x.double() for x in inputs])
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=2**-8 * exact.abs().max().item())


def test_an_unknown_instruction() -> None:
    """The error names those that there are."""
    with pytest.raises(
        ValueError,
        match="'vpdpbusd' in 4 lanes is no dot product of AArch64; there are sdot, udot, usdot, bfdot, smmla",
    ):
        arm.dot_product(Builder(), "vpdpbusd", 4, None, None, None)
