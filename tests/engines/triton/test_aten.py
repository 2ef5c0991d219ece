"""ATen's operators in place of kernels, on the CPU, with the kernels around them interpreted.

What only a GPU has (cuDNN's fused convolutions, its attention, cuBLASLt's GELU) is looked at as a program and has never run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.engines.triton.regions_for_tests import HOPPER, compiled
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.codegen.search import CompiledVariant, compiled_variant, program_of
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

Function = Callable[..., torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def shown(program: Program) -> list[str]:
    """The names of the operators, and "kernel" for each kernel; all of them run without Python."""
    assert all(step.in_python is None for step in program.steps if isinstance(step, OperatorCall))
    return [step.name.removeprefix("aten::") if isinstance(step, OperatorCall) else "kernel" for step in program.steps]


def check(
    folder: Path, function: Function, inputs: tuple[torch.Tensor, ...], *ways: list[str], target: Target = HOPPER
) -> None:
    """These are the steps of the function's programs, by the first, the second ... variants of its kernels, and in each the results are
    eager's, or nearer to float64's."""
    region, taken = compiled(folder, function, *inputs, target=target, operators=True)
    backend = region.kernels.backend
    found = [list(backend.alternatives(kernel, {})) or [Variant("", (kernel,))] for kernel in region.kernels.kernels]
    eager = function(*inputs)
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    tolerance = 2e-5 if eager.dtype == torch.float32 else 2e-2
    programs = []
    for number in range(max(map(len, found))):
        chosen = [compiled_way(region, some[min(number, len(some) - 1)]) for some in found]
        program = program_of(region.kernels, chosen)
        programs.append(shown(program))
        (got,) = ProgramRunner(program)(taken)
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        torch.testing.assert_close(got.to(exact.dtype), exact, rtol=tolerance, atol=tolerance)
    assert programs == list(ways)
    assert shown(region.program) == ways[0]


def compiled_way(region: KernelRegion, variant: Variant) -> CompiledVariant:
    made = compiled_variant(
        variant, region.engine.built(variant.kernels, region.kernels.backend.target, Deadline(120.0))
    )
    assert isinstance(made, CompiledVariant), made
    return made


X, W, B = randn(2, 5, 8), randn(6, 8), randn(6)

# Function, inputs, and the steps of each variant.
PRODUCTS: dict[str, tuple[Function, tuple[torch.Tensor, ...], list[list[str]]]] = {
    "mm": (torch.mm, (randn(5, 8), randn(8, 6)), [["mm"]]),
    "transposed": (lambda a, b: a.t() @ b, (randn(8, 5), randn(8, 6)), [["kernel", "mm"]]),
    "three dimensions": (functional.linear, (X, W), [["mm"]]),
    "bias": (functional.linear, (X, W, B), [["linear"], ["mm", "kernel"]]),
    "bias in float32": (functional.linear, (X.float(), W.float(), B.float()), [["linear"], ["mm", "kernel"]]),
    "bias in bfloat16": (
        functional.linear,
        (X.bfloat16(), W.bfloat16(), B.bfloat16()),
        [["linear"], ["mm", "kernel"]],
    ),
    "bias and more": (
        lambda x, w, b: functional.silu(functional.linear(x, w, b)) * 2,
        (X, W, B),
        [["linear", "kernel"], ["mm", "kernel"]],
    ),
    "ReLU": (
        lambda x, w, b: functional.relu(functional.linear(x, w, b)),
        (X, W, B),
        [["linear", "kernel"], ["_addmm_activation"]],
    ),
    "ReLU and more": (
        lambda x, w, b: functional.relu(functional.linear(x, w, b)) * 2,
        (X, W, B),
        [["linear", "kernel"], ["_addmm_activation", "kernel"]],
    ),
    "a product used twice": (
        lambda x, w, b: functional.relu(y := functional.linear(x, w)) + (y + b),
        (X, W, B),
        [["mm", "kernel"]],
    ),
    "residual": (lambda x, w, r: r + functional.linear(x, w), (X, W, randn(2, 5, 6)), [["mm", "kernel"]]),
    "prologue": (lambda x, w: functional.linear(x * 2 + 1, w), (X, W), [["kernel", "mm"]]),
    "batch": (torch.bmm, (randn(3, 5, 8), randn(3, 8, 6)), [["bmm"]]),
    "batch by one matrix": (torch.matmul, (randn(3, 5, 8), randn(8, 6)), [["mm"]]),
    "parts": (lambda x, w: functional.linear(x[..., 2:6], w[1:, 3:7]), (X, W), [["mm"]]),
    "one row": (functional.linear, (randn(1, 8), W, B), [["linear"], ["mm", "kernel"]]),
    "one column": (functional.linear, (randn(5, 8), randn(1, 8), randn(1)), [["linear"], ["mm", "kernel"]]),
    "result transposed": (
        lambda a, b: torch.mm(a, b).t().contiguous(),
        (randn(5, 8), randn(8, 6)),
        [["mm", "kernel"]],
    ),
    "integers": (lambda a, b: (a @ b).float(), (torch.arange(12).view(3, 4), torch.arange(8).view(4, 2)), [["kernel"]]),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: str, tmp_path: Path) -> None:
    """Operands are read where they lie, and a result is written where it belongs; what cuBLAS cannot fuse are kernels around the call."""
    function, inputs, steps = PRODUCTS[case]
    check(tmp_path, function, inputs, *steps)


def conv(groups: int = 1, padding: int = 1, stride: int = 1) -> Function:
    return lambda x, w, *b: functional.conv2d(x, w, *b, stride=stride, padding=padding, groups=groups)


LAST = torch.channels_last
IMAGE, FILTERS, FILTER_BIAS = randn(2, 4, 6, 7), randn(8, 4, 3, 3) / 6, randn(8)
CONVOLUTIONS: dict[str, tuple[Function, tuple[torch.Tensor, ...], list[str]]] = {
    "channels last": (conv(), (IMAGE.to(memory_format=LAST), FILTERS.to(memory_format=LAST)), ["convolution"]),
    "channels first": (conv(stride=2), (IMAGE, FILTERS), ["kernel", "convolution", "kernel"]),
    "bias and ReLU": (
        lambda x, w, b: functional.relu(conv()(x, w, b)),
        (IMAGE.to(memory_format=LAST), FILTERS, FILTER_BIAS),
        ["convolution", "kernel"],
    ),
    "groups": (conv(2, 0), (IMAGE, randn(8, 2, 3, 3)), ["convolution"]),
    "float32": (conv(), (IMAGE.float(), FILTERS.float()), ["convolution"]),
    "one dimension": (
        lambda x, w: functional.conv1d(x, w, padding=1),
        (randn(2, 4, 9), randn(3, 4, 3)),
        ["convolution"],
    ),
    "two in a row": (
        lambda x, w, b, v: conv()(functional.relu(conv()(x, w, b)), v) + 1,
        (IMAGE, FILTERS, FILTER_BIAS, randn(4, 8, 3, 3) / 9),
        ["kernel", "convolution", "kernel", "convolution", "kernel"],
    ),
    "more zeros before than after": (
        lambda x, w: functional.conv2d(functional.pad(x, (1, 0, 1, 0)), w),
        (IMAGE, FILTERS),
        ["kernel"],
    ),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str, tmp_path: Path) -> None:
    """Those of half types on channels that lie innermost: what is between two of them lies so, and only the ends of a region are copied."""
    function, inputs, steps = CONVOLUTIONS[case]
    check(tmp_path, function, inputs, steps)


def test_float32_convolutions_follow_their_setting(tmp_path: Path) -> None:
    """Where they may round to TF32 tensor cores compute them too."""
    target = dataclasses.replace(HOPPER, convolution_tf32=True)
    check(tmp_path, conv(), (IMAGE.float(), FILTERS.float()), ["kernel", "convolution", "kernel"], target=target)


def sdpa(causal: bool = False) -> Function:
    return lambda q, k, v, *mask: functional.scaled_dot_product_attention(q, k, v, *mask, is_causal=causal)


def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(B, S, H * D) each, and so the result."""
    split = (x.unflatten(-1, (3, 8)).transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


Q = randn(2, 3, 5, 8)
OTHERS = randn(2, 3, 7, 8), randn(2, 3, 7, 8) + 1
ATTENTION = "scaled_dot_product_attention"
ATTENTIONS: dict[str, tuple[Function, tuple[torch.Tensor, ...], list[str]]] = {
    "row by row": (lambda q, k, v: sdpa()(q, k, v).contiguous(), (Q, *OTHERS), [ATTENTION, "kernel"]),
    "heads": (heads, tuple(randn(2, 5 + min(i, 1), 24) + i for i in range(3)), [ATTENTION]),
    "parts of one": (
        lambda x: heads(*x.chunk(3, -1)),
        (randn(2, 5, 72),),
        [ATTENTION],
    ),
    "causal": (sdpa(True), (Q, Q + 1, Q * 2), [ATTENTION, "kernel"]),
    "mask": (sdpa(), (Q, *OTHERS, randn(5, 7)), [ATTENTION, "kernel"]),
    "boolean mask": (sdpa(), (Q, *OTHERS, torch.arange(35).view(5, 7) % 3 > 0), ["kernel", ATTENTION, "kernel"]),
    "grouped heads": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (Q, OTHERS[0][:, :1].clone(), OTHERS[1][:, :1].clone()),
        [ATTENTION, "kernel"],
    ),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention(case: str, tmp_path: Path) -> None:
    """ATen chooses the back end; queries, keys and values are read where they lie, in one tensor if they do."""
    function, inputs, steps = ATTENTIONS[case]
    check(tmp_path, function, inputs, steps)
