"""ATen's operators in place of kernels, on the CPU, with the kernels around them interpreted.

What only a GPU has (cuDNN's fused convolutions, its attention, cuBLASLt's GELU) is looked at as a program and has never run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.codegen.regions_for_tests import region_of
from tests.engines.triton.regions_for_tests import HOPPER, compiled
from tests.services_for_tests import services
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.search import CompiledVariant, compiled_variant, program_of
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton.aten import aten_variants
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

Function = Callable[..., torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def shown(program: Program) -> list[str]:
    """The names of the operators, and "kernel" for each kernel; all of them run without Python."""
    assert all(not step.runs_in_python for step in program.steps if isinstance(step, OperatorCall))
    return [step.name.removeprefix("aten::") if isinstance(step, OperatorCall) else "kernel" for step in program.steps]


def check(
    folder: Path, function: Function, inputs: tuple[torch.Tensor, ...], *ways: list[str], target: Target = HOPPER
) -> None:
    """These are the steps of the function's programs, by the first, the second ... variants of its kernels, and in each the results are
    eager's, or nearer to float64's."""
    region, taken = compiled(folder, function, *inputs, target=target, operators=True)
    found = [list(aten_variants(kernel, target)) or [Variant("", (kernel,))] for kernel in region.kernels.kernels]
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
    "transposed": (lambda a, b: a.t() @ b, (randn(8, 5), randn(8, 6)), [["mm"]]),
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
    "volumes": (
        lambda x, w: functional.relu(functional.conv3d(x, w, padding=1, stride=2)),
        (randn(1, 4, 4, 5, 4), randn(8, 4, 3, 3, 3) / 9),
        ["convolution", "kernel"],
    ),
    "transposed": (
        lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        (IMAGE, randn(4, 3, 3, 3) / 4),
        ["convolution"],
    ),
    "transposed, channels last": (
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2, dilation=2),
        (IMAGE.to(memory_format=LAST), randn(4, 8, 3, 3) / 6, FILTER_BIAS),
        ["convolution", "kernel"],
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
    """Tensor cores compute convolutions in float32 where they may round to TF32."""
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


GPU = Target(90, 132)
LAST_IMAGE, LAST_SUM = IMAGE.to(memory_format=LAST), randn(2, 8, 6, 7).to(memory_format=LAST)
HEAD = tuple(randn(2, 16, 4, 64).transpose(1, 2) for _ in range(3))
ON_A_GPU: dict[str, tuple[Function, tuple[torch.Tensor, ...], list[str]]] = {
    "ReLU behind a convolution": (
        lambda x, w, b: functional.relu(conv()(x, w, b)),
        (LAST_IMAGE, FILTERS, FILTER_BIAS),
        ["convolution, then a kernel", "cudnn_convolution_relu"],
    ),
    "ReLU behind a sum": (
        lambda x, w, b, z: functional.relu(conv()(x, w, b) + z),
        (LAST_IMAGE, FILTERS, FILTER_BIAS, LAST_SUM),
        ["convolution, then a kernel", "cudnn_convolution_add_relu"],
    ),
    "ReLU behind a sum that lies otherwise": (
        lambda x, w, z: functional.relu(conv()(x, w) + z),
        (LAST_IMAGE, FILTERS, LAST_SUM.contiguous()),
        ["convolution, then a kernel"],
    ),
    "GELU": (
        lambda x, w, b: functional.gelu(functional.linear(x, w, b), approximate="tanh"),
        (X, W, B),
        ["linear, then a kernel", "_addmm_activation"],
    ),
    "the exact GELU": (
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        (X, W, B),
        ["linear, then a kernel", "mm, then a kernel"],
    ),
    "attention": (
        lambda q, k, v: sdpa()(q, k, v).transpose(1, 2).flatten(2),
        HEAD,
        [ATTENTION, "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"],
    ),
    "attention of float32": (
        lambda q, k, v: sdpa()(q, k, v).transpose(1, 2).flatten(2),
        tuple(x.float() for x in HEAD),
        [ATTENTION],
    ),
    "attention with a mask": (
        lambda q, k, v, m: sdpa()(q, k, v, m).transpose(1, 2).flatten(2),
        (*HEAD, randn(16, 16)),
        [ATTENTION, "_scaled_dot_product_cudnn_attention"],
    ),
}


@pytest.mark.parametrize("case", ON_A_GPU)
def test_what_only_a_gpu_has(case: str) -> None:
    """Each call fits its operator's schema, and the plan can make it without Python. They have never run."""
    function, inputs, ways = ON_A_GPU[case]
    assembled = assemble(region_of(function, *inputs), TritonBackend(GPU))
    (found,) = (some for some in (aten_variants(kernel, GPU) for kernel in assembled.kernels) if some)
    assert [variant.name.removeprefix("aten::") for variant in found] == ways
    assert [variant.is_preferred for variant in found] == [True] + [False] * (len(ways) - 1)
    for variant in found:
        if variant.compiled_kernels == 0:
            program = assembled.with_variants([variant]).program([Artifact("", "", "")])
            (call,) = program.steps
            assert isinstance(call, OperatorCall)
            assert not call.runs_in_python
            over = call.over(lambda buffer: buffer, lambda argument: argument.buffer)
            assert len(over.describe()["arguments"]) == len(call.arguments)


@pytest.mark.parametrize("aten_us", [10.0, 1000.0])
def test_the_faster_one_is_taken_and_kept(aten_us: float, tmp_path: Path) -> None:
    """ATen is taken where nothing was timed; by the clock the kernel may win. A later process knows, one on another GPU finds out by itself."""
    timed: list[str] = []

    class Timed(ProgramRunner):
        def __init__(self, program: Program) -> None:
            super().__init__(program)
            self._us = {"mm": aten_us, "kernel": 100.0}
            self._steps = shown(program)

        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            timed.extend(self._steps)
            return [self._us[step] for step in self._steps]

    inputs = randn(128, 128), randn(128, 128)
    region = region_of(torch.mm, *inputs)

    def chosen(target: Target) -> list[str]:
        timed.clear()
        engine = KernelEngine(TritonBackend(target, operators=True), Config(), services(tmp_path, Timed))
        (made,) = engine.compile([region], Deadline(120.0))
        assert isinstance(made, KernelRegion), made
        refined = made.refine(inputs, 0.0, Deadline(120.0))
        torch.testing.assert_close(refined(inputs)[0], torch.mm(*inputs), rtol=1e-2, atol=1e-2)
        return shown(refined.program)

    winner = ["mm" if aten_us < 100 else "kernel"]
    assert chosen(HOPPER) == winner
    assert set(timed) == {"mm", "kernel"}
    assert chosen(HOPPER) == winner
    assert not timed
    assert chosen(dataclasses.replace(HOPPER, multiprocessors=5)) == winner
    assert set(timed) == {"mm", "kernel"}


def test_an_operator_that_cannot_run_costs_itself_only(tmp_path: Path) -> None:
    """Operators that were timed in the same run as one that cannot run are timed again, without it."""
    us = {"linear": 10.0, "mm": 200.0, "kernel": 100.0}

    class Timed(ProgramRunner):
        def __init__(self, program: Program) -> None:
            super().__init__(program)
            self._steps = shown(program)

        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            if "_addmm_activation" in self._steps:
                raise HybridError("no such epilogue")
            return [us[step] for step in self._steps]

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.relu(functional.linear(x, w, b)) @ v

    inputs = randn(128, 128), randn(96, 128) / 16, randn(96), randn(96, 120) / 16
    region = region_of(function, *inputs)
    by_shape = {x.shape: x for x in inputs}
    taken = [by_shape[torch.Size(item.spec.shape)] for item in region.inputs if item.spec is not None]
    engine = KernelEngine(TritonBackend(HOPPER, operators=True), Config(), services(tmp_path, Timed))
    (made,) = engine.compile([region], Deadline(120.0))
    assert isinstance(made, KernelRegion), made
    refined = made.refine(taken, 0.0, Deadline(120.0))
    assert shown(refined.program) == ["kernel", "kernel"]
    first, second = refined.options
    tilings = {name: 100.0 for name in (*first.times, *second.times) if name.startswith("tiles")}
    assert {**first.times, **tilings} == {"aten::linear, then a kernel": 110.0, "": 100.0, **tilings}
    assert {**second.times, **tilings} == {"aten::mm": 200.0, "": 100.0, **tilings}
    torch.testing.assert_close(refined(taken)[0], function(*inputs), rtol=2e-2, atol=2e-2)


def test_a_whole_model_of_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and the kernels around them take the sizes of each call, read the parameters where they are, and see them change."""
    torch.compiler.reset()  # Dynamo takes sizes for symbolic that other tests varied in calls of the same `forward`
    engine = ("triton", lambda config, services: KernelEngine(TritonBackend(HOPPER, operators=True), config, services))
    monkeypatch.setattr(session, "ENGINES", (engine, session.ENGINES[-1]))
    monkeypatch.setattr(session, "_sessions", {})
    config = dataclasses.replace(Config(), placement="estimate", strict=True, cache_dir=tmp_path, engines=("triton",))
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 16), torch.nn.SiLU()
    ).eval()
    plans: list[Plan] = []
    compiled_module = torch.compile(module, backend=lambda gm, inputs: compile_graph(gm, inputs, config, plans.append))
    with torch.no_grad():
        for batch in (3, 5, 17, 5):
            x = torch.randn(batch, 3, 4, 4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled_module(x), module(x), rtol=1e-4, atol=1e-5)
            module[3].weight.mul_(1.5)
    plan = plans[-1]
    assert [region.engine for region in plan.regions] == ["triton"]
    assert [operator.split(":")[2] for operator in plan.regions[0].operators] == ["convolution", "linear"]
