"""Instructions of x86 in machine code: dot products are the instructions that were meant, and their sums stay in registers."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.engines.cpu.test_dot_products import AVX2, AVX_VNNI, BF16
from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir import x86
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.partition.regions import partition_graph

CASES = {
    "vpdpbusd": (Target("znver4", BF16.cpu, BF16.features, 16, 2, 32 << 10, 1 << 20), torch.uint8),
    "{vex} vpdpbusd": (Target("alderlake", AVX_VNNI.cpu, AVX_VNNI.features, 8, 2, 32 << 10, 1 << 20), torch.uint8),
    "vpmaddubsw": (AVX2, torch.uint8),
    "vpmaddwd": (AVX2, torch.uint8),
    "vdpbf16ps": (Target("znver4", BF16.cpu, BF16.features, 16, 2, 32 << 10, 1 << 20), torch.bfloat16),
}


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bfloat16:
        return torch.nn.functional.conv2d(x, w, None, 1, 1)
    return torch.nn.functional.conv2d(x.float() * 0.5, w.float() * 0.5, None, 1, 1)


def by_seven_bits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Either, by a weight that the graph says has 7 bits."""
    wide, scales = x.float() * 0.5, torch.full((w.shape[0],), 0.5)
    weight = torch.ops.quantized_decomposed.dequantize_per_channel.default(w, scales, None, 0, -64, 64, torch.int8)
    return torch.mm(wide, weight.t()) if x.dim() == 2 else torch.nn.functional.conv2d(wide, weight, None, 1, 1)


def multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w) if x.dtype == torch.bfloat16 else torch._int_mm(x, w)


@pytest.mark.parametrize("instruction", CASES)
@pytest.mark.parametrize("kind", ["matmul", "convolution"])
def test_inner_loops_multiply_words_and_spill_nothing(kind: str, instruction: str) -> None:
    """Compiled for processors of each instruction set, wherever the test runs: at least one instruction for each sum, no vector on the stack
    between two of them, but a few where there are 16 registers."""
    target, dtype = CASES[instruction]
    shapes = ((56, 256), (256, 64)) if kind == "matmul" else ((1, 64, 14, 14), (64, 64, 3, 3))
    function = multiplied if kind == "matmul" else convolved
    if instruction == "vpmaddubsw":
        shapes, function = (shapes[0], shapes[1] if kind != "matmul" else (64, 256)), by_seven_bits
    x, w = torch.zeros(shapes[0], dtype=dtype), torch.zeros(shapes[1], dtype=torch.int8)
    inputs = [x, w.to(dtype) if dtype == torch.bfloat16 else w]
    backend = TvmBackend(target)
    engine = KernelEngine(backend, Config(compile_threads=1), services())
    graph = trace(function, *inputs)
    (segment,) = partition_graph(graph, [engine], Config()).graph.segments
    made = segment.region.inputs
    region = dataclasses.replace(segment.region, inputs=(made[0], dataclasses.replace(made[1], is_constant=True)))
    kernels = assemble(region, backend).kernels
    (kernel,) = [k for k in kernels if isinstance(k, CpuMatMulKernel | CpuConvKernel)]
    assembly = build("kernel", emit_kernel(kernel, "kernel", target), tvm_target(target)).inspect_source("asm")
    name = instruction.rsplit(" ", maxsplit=1)[-1]
    lines = assembly.splitlines()
    places = [i for i, line in enumerate(lines) if re.search(rf"\b{name}\b", line)]
    assert len(places) >= 12
    assert ("{vex}" in assembly) == ("{vex}" in instruction)
    # Between neighbouring products: what lies further apart belongs to other loops.
    between = [line for a, b in itertools.pairwise(places) if b - a < 12 for line in lines[a:b]]
    spills = [line for line in between if re.search(r"[xyz]mm\d+, .*\(%r[sb]p", line)]
    # Of what waits to be added, with 16 registers, LLVM keeps a few on the stack: one in so many products.
    spilled = {"vpmaddwd": 8, "vpmaddubsw": 5}
    assert len(spills) <= (len(places) // spilled[name] if name in spilled else 0)


def test_another_processors_dot_product_is_an_error() -> None:
    """The error names those that there are."""
    with pytest.raises(ValueError, match=r"'sdot' is no dot product of x86; there are vpdpbusd"):
        x86.dot_product(Builder(), "sdot", 4, None, None, None)
