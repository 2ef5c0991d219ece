"""Regions as kernels and programs, with a backend that packs and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS
from tests.interpreter.backend import InterpreterBackend
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.program import KernelCall, OperatorCall, Program, TensorArgument
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.kernels import MapKernel, RowKernel
from torch_hybrid_backend.loops.lowering import Refuse

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def program_of(assembled: RegionKernels) -> Program:
    """With artifacts that do not exist."""
    return assembled.program([Artifact(f"{n}.so", f"kernel{n}", f"key{n}") for n in range(len(assembled.kernels))])


def layers(x: torch.Tensor, w: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ w + unused.numel()


def test_a_program_of_packed_products() -> None:
    """A weight of two products is packed once; an input that nothing reads has no buffer."""
    x, w = torch.randn(40, 40), torch.randn(40, 40)
    assembled = assemble(region_of(layers, x, w, torch.randn(3)), TvmBackend(_AVX512))
    program = program_of(assembled)
    assert [type(step) for step in program.steps] == [KernelCall, KernelCall]
    (constant,) = program.constants
    assert constant.sources == (1,)
    assert torch.equal(constant.pack(w)[0, 0], w[:, :32])
    assert [position >= 0 for position in program.inputs] == [True] + [False] * (len(program.inputs) - 1)
    first, second = program.steps
    assert isinstance(first, KernelCall)
    assert isinstance(second, KernelCall)
    assert [first.symbol, second.symbol] == ["kernel0", "kernel1"]
    assert program.inputs[0] in first.arguments
    assert constant.buffer in first.arguments
    assert constant.buffer in second.arguments
    assert first.arguments[-1] in second.arguments
    assert second.arguments[-1] == program.outputs[0]
    assert program.buffers[program.outputs[0]].shape == (40, 40)


def test_parameters_that_operators_read_are_not_copied() -> None:
    """Operators read parameters where they lie, with the graph's strides."""
    x, w = torch.randn(8, 8), torch.randn(8, 8).t()
    program = program_of(assemble(region_of(torch.mm, x, w), InterpreterBackend()))
    (step,) = program.steps
    assert isinstance(step, OperatorCall)
    assert not program.constants
    assert program.buffers[program.inputs[1]] == TensorSpec.of(w)


def test_stages_of_rows() -> None:
    """A softmax is one kernel: what later stages read is kept, what the region gives back is stored."""
    assembled = assemble(region_of(partial(torch.softmax, dim=1), torch.randn(64, 100)), TvmBackend(_AVX512))
    (kernel,) = assembled.kernels
    assert isinstance(kernel, RowKernel)
    assert kernel.axes == (1,)
    kinds = [stage.kind for stage in kernel.stages]
    assert [s.combiner for s in kernel.stages if s.kind == "reduce"] == ["max", "sum"]
    assert kinds[0] == "reduce"
    assert kinds[-1] == "store"
    assert [argument.buffer for argument in kernel.writes] == list(assembled.outputs)


def test_literals_are_constants_without_a_source() -> None:
    """A tensor that the graph itself holds."""
    table = torch.arange(64.0)
    program = program_of(assemble(region_of(lambda x: x * table, torch.randn(64)), TvmBackend(_AVX512)))
    (literal,) = program.constants
    assert literal.sources == ()
    assert torch.equal(literal.pack(), table)


def test_another_variant_takes_the_kernels_place() -> None:
    """Its kernels run, and its buffers have layouts."""
    assembled = assemble(region_of(lambda x: x.exp() + 1, torch.randn(64)), TvmBackend(_AVX512))
    other = assemble(region_of(lambda x: x.exp() + 2, torch.randn(64)), TvmBackend(_AVX512))
    (kernel,) = other.kernels
    assert isinstance(kernel, MapKernel)
    changed = assembled.with_variants([Variant("", (kernel,))])
    assert changed.kernels == (kernel,)
    assert program_of(changed).origins == program_of(assembled).origins == (frozenset({"add"}),)
    twice = assembled.with_variants([Variant("", (kernel, kernel))])
    assert program_of(twice).origins == (frozenset({"add"}),) * 2
    assert {argument.buffer for argument in (*kernel.reads, *kernel.writes)} <= changed.layouts.keys()


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ w


def twice_transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x) @ w.t()) @ w.t()  # x comes first: the others are constants


def twice_convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.conv2d(torch.relu(torch.conv2d(x, w, padding=1)), w, padding=1)


@pytest.mark.parametrize(
    ("function", "x", "w", "way"),
    [
        (twice, torch.randn(64, 64), torch.randn(64, 64), "amx float32"),
        # By vectors it is read where it lies.
        (twice_transposed, torch.randn(128, 1536), torch.randn(1536, 1536), "amx float32"),
        (twice_convolved, torch.randn(1, 64, 28, 28), torch.randn(64, 64, 3, 3), "winograd 4"),
        (twice_convolved, torch.randn(1, 64, 28, 28), torch.randn(64, 64, 3, 3), "amx float32"),
        (twice_convolved, torch.randn(1, 64, 28, 28), torch.randn(64, 64, 3, 3), "onednn"),
    ],
)
def test_variants_share_what_they_pack(
    function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, way: str
) -> None:
    """A layer that is called twice: two kernels, one constant, which both read. A layer of another weight has its own."""
    assembled = assemble(region_of(function, x, w), TvmBackend(SAPPHIRE_RAPIDS))
    constants = {packed.buffer: packed for packed in assembled.packed}
    chosen = [
        next((v for v in assembled.backend.alternatives(k, constants) if v.name == way), Variant("", (k,)))
        for k in assembled.kernels
    ]
    assert [variant.name for variant in chosen].count(way) == 2
    program = program_of(assembled.with_variants(chosen))
    (constant,) = program.constants
    assert sum(constant.buffer in buffers_of(step) for step in program.steps) == 2
    packed = next(variant for variant in chosen if variant.name == way).packed[0]
    assert torch.equal(memory_of(constant.pack(w)), memory_of(packed.pack(w)))


def test_other_constants_are_not_shared() -> None:
    """Two weights, or one weight packed in two ways, are not shared."""

    def both(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) @ v

    x, w, v = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64)
    for function, inputs in ((both, (x, w, v)), (twice, (x, w))):
        assembled = assemble(region_of(function, *inputs), TvmBackend(SAPPHIRE_RAPIDS))
        constants = {packed.buffer: packed for packed in assembled.packed}
        chosen = [Variant("", (kernel,)) for kernel in assembled.kernels]
        ways = {way.name: way for way in assembled.backend.alternatives(assembled.kernels[-1], constants)}
        chosen[-1] = ways["amx float32"]
        program = program_of(assembled.with_variants(chosen))
        first, second = program.constants
        assert first.pack(w).shape != second.pack(inputs[-1]).shape
        assert second.sources == ((2,) if function is both else (1,)) or first.sources == (1,)


def memory_of(packed: torch.Tensor) -> torch.Tensor:
    """Its elements as they lie: oneDNN's own tensors become plain ones."""
    return packed.to_dense() if packed.is_mkldnn else packed


def buffers_of(step: object) -> list[int]:
    """The buffers that a step names."""
    if isinstance(step, OperatorCall):
        return [argument.buffer for argument in step.arguments if isinstance(argument, TensorArgument)]
    assert isinstance(step, KernelCall)
    return list(step.arguments)


def test_what_is_not_taken_is_refused() -> None:
    """An operator without a lowering."""
    with pytest.raises(Refuse, match="lgamma"):
        assemble(region_of(torch.lgamma, torch.rand(4)), TvmBackend(_AVX512))
