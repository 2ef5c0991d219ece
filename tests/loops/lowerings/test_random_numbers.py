"""Operators that draw random numbers: every element gets the number that PyTorch's kernels on a GPU give it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, compiled
from tests.partition.engines_for_tests import trace
from tests.random_numbers_for_tests import EagerOnGpu, PhiloxGenerator
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.engines.triton.policy import POLICY
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten

BLOCKS = 2
TARGET = dataclasses.replace(HOPPER, random_blocks=BLOCKS)
ABILITIES = dataclasses.replace(POLICY.abilities, random_blocks=BLOCKS)
SEED, OFFSET = (0xFEDCBA98 << 32) + 77, (5 << 33) + 12  # all bits of the seed, more than 32 of the offset


def _run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., object], *inputs: torch.Tensor
) -> tuple[list[torch.Tensor], EagerOnGpu, Callable[[], None]]:
    """The results of one call, eager from the same state, and a check that both leave the generator alike."""
    ours = PhiloxGenerator(SEED, OFFSET).install(monkeypatch)
    region, taken = compiled(folder, function, *inputs, target=TARGET)  # type: ignore[arg-type]
    results = region(taken)
    other = PhiloxGenerator(SEED, OFFSET)

    def check() -> None:
        assert ours.state == other.state

    return results, EagerOnGpu(other, BLOCKS), check


def _flat(tensor: torch.Tensor) -> np.ndarray:
    """The elements as they lie in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).double().numpy()


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the dtype, rounded as Triton's interpreter does: it cuts bfloat16 off."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    return (values.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)


def _reversed(numbers: np.ndarray, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """The results of `uniform_kernel` for numbers in (0, 1]."""
    start, stop = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.from_numpy(numbers).to(compute) * (stop - start).to(compute) + start.to(compute)
    values = _narrowed(values, dtype)
    return torch.where(values == stop, start, values).double().numpy()


@pytest.mark.parametrize("numel", [1, 255, 4 * 512 + 3, 9000])
def test_uniform_numbers_are_those_of_eager(numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: fewer elements than one block has threads, and more than all threads take in one turn; in every dtype, with bounds of one's
    own; a result that lies column by column gets them in the order of memory."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = [torch.rand(numel, dtype=dtype) for dtype in dtypes]
        return (*drawn, aten.uniform.default(x, -1.5, 2.5), torch.rand_like(x.t()))

    x = torch.zeros(1, numel) if numel % 3 else torch.zeros(3, numel // 3)
    results, eager, check = _run(tmp_path, monkeypatch, function, x)
    for result, dtype in zip(results, dtypes, strict=False):
        name = "float64" if dtype == torch.float64 else "float32"
        assert result.dtype == dtype
        np.testing.assert_array_equal(_flat(result), _reversed(eager.uniform(numel, name), dtype))
    np.testing.assert_array_equal(_flat(results[4]), _reversed(eager.uniform(numel), torch.float32, -1.5, 2.5))
    np.testing.assert_array_equal(_flat(results[5]), _reversed(eager.uniform(numel), torch.float32))
    check()


def test_what_rounds_to_the_upper_bound_becomes_the_lower_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in 4096 of float16 rounds to 1, which [0, 1) does not have."""
    (result,), eager, check = _run(tmp_path, monkeypatch, lambda: torch.rand(30_000, dtype=torch.float16))
    numbers = eager.uniform(30_000)
    assert (numbers.astype(np.float16) == 1).any()
    np.testing.assert_array_equal(_flat(result), _reversed(numbers, torch.float16))
    check()


def test_normal_numbers_are_those_of_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal numbers are as near as functions of the CPU are to those of a GPU, sines before cosines; with a mean and a standard deviation
    too."""
    numel = 4 * 512 + 3

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.randn(numel), torch.randn_like(x), aten.normal_functional.default(x, 3.0, 0.5)

    results, eager, check = _run(tmp_path, monkeypatch, function, torch.zeros(7, 11))
    np.testing.assert_allclose(_flat(results[0]), eager.normal(numel), rtol=0, atol=2e-6)
    np.testing.assert_allclose(_flat(results[1]), eager.normal(77), rtol=0, atol=2e-6)
    np.testing.assert_allclose(_flat(results[2]), 3.0 + 0.5 * eager.normal(77), rtol=0, atol=2e-6)
    check()


def test_bernoulli_draws_as_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 where the number is below p, whatever the tensor holds; in float64 of two numbers."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.bernoulli.p(x, 0.3), aten.bernoulli.p(y, 0.7)

    results, eager, check = _run(
        tmp_path, monkeypatch, function, torch.zeros(3000, dtype=torch.bfloat16), torch.zeros(1100, dtype=torch.float64)
    )
    np.testing.assert_array_equal(_flat(results[0]), eager.uniform(3000) < np.float32(0.3))
    np.testing.assert_array_equal(_flat(results[1]), eager.uniform(1100, "float64") < 0.7)
    check()


@pytest.mark.parametrize(
    ("dtype", "shape", "vector"),
    [
        (torch.float32, (16, 300), 4),
        (torch.float32, (3, 2, 37), 2),
        (torch.float32, (7, 301), 1),
        (torch.bfloat16, (16, 600), 8),
        (torch.float16, (3, 4, 15), 4),
        (torch.float64, (10, 250), 2),
    ],
)
def test_dropout_keeps_what_eager_keeps(
    dtype: torch.dtype, shape: tuple[int, ...], vector: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread takes as many neighbours as 16 bytes hold, and fewer where their number does not divide that of the elements. What is dropped
    is multiplied by 0: of infinity that is NaN."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    x.view(-1)[:40] = torch.inf
    (result, mask), eager, check = _run(tmp_path, monkeypatch, lambda x: aten.native_dropout.default(x, 0.4, True), x)
    kept = torch.from_numpy(eager.kept(x.numel(), 0.4, vector)).view(shape)
    assert torch.equal(mask, kept)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    keep = torch.tensor(1.0 - 0.4, dtype=compute)
    expected = _narrowed(x.to(compute) * kept.to(compute) * (1.0 / keep.double()).to(compute), dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    check()


def test_dropout_of_other_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed tensor is gone through as it lies in memory; one with gaps row by row, element by element; one that begins in the middle of
    16 bytes in smaller vectors."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(aten.native_dropout.default(each, 0.5, True)[1] for each in (x, y, z))

    x, y, z = torch.zeros(24, 100).t(), torch.zeros(24, 101)[:, :100], torch.zeros(4 * 512 + 2)[2:]
    results, eager, check = _run(tmp_path, monkeypatch, function, x, y, z)
    assert torch.equal(results[0], torch.from_numpy(eager.kept(2400, 0.5, 4)).view(24, 100).t())
    assert torch.equal(results[1], torch.from_numpy(eager.kept(2400, 0.5, 1)).view(24, 100))
    assert torch.equal(results[2], torch.from_numpy(eager.kept(2048, 0.5, 2)))
    check()


def test_dropout_that_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside training all is kept, with p=1 nothing; the generator stays where it is, as in eager."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*aten.native_dropout.default(x, 0.4, False), *aten.native_dropout.default(x, 1.0, True))

    x = torch.randn(20)
    (same, kept, nothing, dropped), _, check = _run(tmp_path, monkeypatch, function, x)
    assert torch.equal(same, x)
    assert kept.all()
    assert not nothing.any()
    assert not dropped.any()
    check()


def test_a_number_read_by_several_kernels_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may draw it again where they read it. What nobody reads is drawn past; the next call goes on where this one ended."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(3000)
        noise = torch.rand(40, 50)
        return x + noise, (x * noise).sum(1), x.t() @ noise

    ours = PhiloxGenerator(SEED, OFFSET).install(monkeypatch)
    x = torch.randn(40, 50)
    region, taken = compiled(tmp_path, function, x, target=TARGET)
    eager = EagerOnGpu(other := PhiloxGenerator(SEED, OFFSET), BLOCKS)
    for _ in range(3):
        results = region(taken)
        eager.uniform(3000)
        noise = torch.from_numpy(_reversed(eager.uniform(2000), torch.float32)).view(40, 50)
        wide = x.double()
        for result, expected in zip(results, (wide + noise, (wide * noise).sum(1), wide.t() @ noise), strict=True):
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        assert ours.state == other.state


def _verdict(function: Callable[..., object], *inputs: torch.Tensor, random: bool = True) -> object:
    node = next(n for n in trace(function, *inputs).graph.nodes if n.op == "call_function" and "getitem" not in n.name)  # type: ignore[arg-type]
    return supports(node, ABILITIES if random else POLICY.abilities)


def test_refusals_say_what_cannot_be_drawn() -> None:
    """Kernels that cannot draw eager's numbers, a generator of one's own, normal numbers in float64, more than PyTorch draws in one piece."""
    x = torch.zeros(4, 6)
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    own = graph.call_function(aten.uniform.default, (given,), {"generator": torch.Generator()})
    given.meta["val"] = own.meta["val"] = x
    for verdict in (
        supports(own, ABILITIES),
        _verdict(lambda: torch.rand(4), random=False),
        _verdict(lambda x: aten.native_dropout.default(x, 0.5, True), x, random=False),
        _verdict(lambda: torch.randn(4, dtype=torch.float64)),
        _verdict(lambda: torch.rand(1 << 30)),
    ):
        assert isinstance(verdict, Refused)
        assert verdict.code == Reason.RANDOM
