"""Dot products of AArch64: the instructions that were meant, without spills, and equal sums from the arithmetic in their place."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

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
    if x.dtype == torch.float32:
        return nn.functional.conv2d(x, w, None, 1, 1)
    return nn.functional.conv2d(x.float() * 0.5, w.float() * 0.5, None, 1, 1)


def multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w) if x.dtype == torch.float32 else torch._int_mm(x, w)


def inner_loop(assembly: str, instruction: str) -> list[str]:
    """The lines of the block with the most of an instruction."""
    blocks = re.split(r"^\.?\w.*:.*$", assembly, flags=re.MULTILINE)
    return max(blocks, key=lambda block: len(re.findall(rf"\b{instruction}\b", block))).splitlines()


@pytest.mark.parametrize(
    ("name", "left", "instruction"),
    [
        ("armv8-a", torch.float32, "fmla"),
        ("neoverse-n1", torch.int8, "sdot"),
        ("neoverse-n1", torch.uint8, "sdot"),
        ("neoverse-v1", torch.uint8, "sudot"),  # USDOT by element, its factors exchanged
    ],
)
@pytest.mark.parametrize("function", [multiplied, convolved])
def test_inner_loops_spill_nothing(function: object, name: str, left: torch.dtype, instruction: str) -> None:
    """At least twelve sums stay in registers."""
    target = Target.named(name)
    backend = TvmBackend(target)
    shapes = ((56, 256), (256, 64)) if function is multiplied else ((1, 64, 14, 14), (64, 64, 3, 3))
    right = torch.float32 if left == torch.float32 else torch.int8
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
    if function is multiplied:  # around an image lies a number that is no lane
        assert all(re.search(r"\[\d\]$", line) for line in products), "a factor is a lane"
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
    low, high = (-128, 127) if dtype == torch.int8 else (0, 255)
    model, x = _Layer(), torch.randint(low, high + 1, (1, 8, 9, 9), dtype=dtype)
    x.view(-1)[:200:2], x.view(-1)[1:200:2] = low, high
    options = {"target": name, "placement": "estimate", "prefer_kernels": True, "engines": "tvm", "strict": True}
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options=options)
        assert torch.equal(compiled(x), model(x))


def test_an_unknown_instruction() -> None:
    """The error names those that there are."""
    with pytest.raises(
        ValueError, match="'vpdpbusd' in 4 lanes is no dot product of AArch64; there are sdot, udot, usdot"
    ):
        arm.dot_product(Builder(), "vpdpbusd", 4, None, None, None)
