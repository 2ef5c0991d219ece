"""Models that draw random numbers, where eager draws as it does on a GPU: compiled ones have its numbers, call by call.

PyTorch's operators on the CPU are replaced by those of `tests/random_numbers_for_tests.py`, and the generator by one of that kind; the Triton
engine's kernels are interpreted.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.compiling import by_estimate, fresh_dynamo
from tests.engines.triton.regions_for_tests import HOPPER, interpret_for
from tests.random_numbers_for_tests import EagerOnGpu, PhiloxGenerator
from torch_hybrid_backend.engines.triton.host_driver import DRIVER, DriverError, HostDriver, Status

__all__ = ["by_estimate", "fresh_dynamo"]

pytest.importorskip("triton")

_BLOCKS = 2


@pytest.fixture
def drawn() -> list[str]:
    """The operators that drew in eager."""
    return []


@pytest.fixture(autouse=True)
def generator(drawn: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PhiloxGenerator]:
    """The generator that eager and kernels share."""
    interpret_for(dataclasses.replace(HOPPER, random_blocks=_BLOCKS), monkeypatch)
    found = PhiloxGenerator(seed=7).install(monkeypatch)
    eager = EagerOnGpu(found, _BLOCKS)

    def like(x: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
        """The numbers in a tensor as x lies in memory."""
        flat = torch.from_numpy(numbers).to(x.dtype)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(flat.as_strided(x.shape, x.stride()))

    def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append("native_dropout")
        size = 16 // x.element_size()
        vector = next(v for v in (size, size // 2, size // 4 or 1, 1) if v and x.numel() % v == 0)
        kept = like(x, eager.kept(x.numel(), p, vector).astype(np.float64)).bool()
        return x * kept * (1 / (1 - p)), kept

    def uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, generator: object = None) -> torch.Tensor:
        drawn.append("uniform_")
        numbers = like(x, eager.uniform(x.numel(), str(x.dtype).removeprefix("torch.")))
        return x.copy_(torch.where(numbers == 1, 0.0, numbers) * (high - low) + low)

    def exponential(x: torch.Tensor, rate: float = 1.0, generator: object = None) -> torch.Tensor:
        drawn.append("exponential_")
        return x.copy_(-like(x, eager.uniform(x.numel())).log() / rate)

    library = torch.library.Library("aten", "IMPL")
    own = {"native_dropout": native_dropout, "uniform_": uniform, "exponential_": exponential}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces kernels of PyTorch's is the point
        for name, function in own.items():
            library.impl(name, function, "CPU")
    yield found
    library._destroy()


class Block(nn.Module):
    """Dropout behind a GELU and in front of an addition, noise, and numbers that only eager draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 50), nn.Linear(50, 24)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        """`nn.Dropout` on a GPU."""
        return torch.native_dropout(x, 0.3, True)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(functional.gelu(self.first(x)))
        y = x + self.dropout(self.second(y))
        y = y * torch.empty_like(y).exponential_()
        return self.dropout(functional.silu(y)) + torch.rand_like(y)


def test_a_training_step_has_eagers_numbers(
    generator: PhiloxGenerator, drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, what only eager draws between them, and gradients, for which nothing is drawn anew: the first call, which verifies, and later
    ones, by kernels, also where these are CUDA graphs. The generator stands after each call where eager leaves it."""
    monkeypatch.setenv("HYBRID_CUDA_GRAPHS", "1")
    graphs: list[list[int]] = []  # the kernels of each that was launched
    launched = HostDriver.launch_graph

    def recorded(self: HostDriver, executable: int) -> None:
        graphs.append([node.kernel for node in self._graphs[executable].values()])
        launched(self, executable)

    monkeypatch.setattr(HostDriver, "launch_graph", recorded)
    torch.manual_seed(0)
    model = Block()
    fast = torch.compile(copy.deepcopy(model), backend="hybrid")
    results: dict[str, list[torch.Tensor]] = {"eager": [], "hybrid": []}
    for name, run in (("eager", model), ("hybrid", fast)):
        generator.state = (7, 0)
        for call in range(4):
            x = torch.randn(6, 24, generator=torch.Generator().manual_seed(call), requires_grad=True)
            out = run(x)
            out.sin().sum().backward()
            if name == "hybrid" and call > 0:
                assert drawn == ["exponential_"]
            drawn.clear()
            assert x.grad is not None
            results[name] += [out.detach(), x.grad, torch.tensor(generator.get_offset())]
    for ours, eager in zip(results["hybrid"], results["eager"], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    drawing = [kernels for kernels in graphs if any("random" in DRIVER._headers[kernel].symbol for kernel in kernels)]
    assert len(drawing) == 2  # from the second call of the plan on


def test_sizes_known_only_at_run_time(generator: PhiloxGenerator, drawn: list[str]) -> None:
    """Dropout of a width that is known, and of any number of rows: each call has eager's numbers, and takes as many."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(functional.gelu(x), 0.3, True)[0] + 1

    fast = torch.compile(function, backend="hybrid")
    for call, rows in enumerate((5, 90, 3)):
        x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
        torch._dynamo.mark_dynamic(x, 0)
        generator.state = (call, 4 * call)
        expected, state = function(x), generator.state
        generator.state = (call, 4 * call)
        drawn.clear()
        torch.testing.assert_close(fast(x), expected)
        assert generator.state == state
        assert call == 0 or not drawn


def test_a_region_that_fails_is_run_again_with_the_same_numbers(
    generator: PhiloxGenerator, drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, which takes a region over while the first call runs, draws what the kernels would have drawn."""
    monkeypatch.setenv("HYBRID_STRICT", "0")
    launched = HostDriver.launch

    def failing(self: HostDriver, *arguments: Any) -> None:
        launched(self, *arguments)
        raise DriverError(Status.NOT_SUPPORTED)

    monkeypatch.setattr(HostDriver, "launch", failing)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(functional.gelu(x), 0.3, True)[0] + 1

    x = torch.randn(6, 40)
    expected, state = function(x), generator.state
    generator.state = (7, 0)
    assert torch.equal(torch.compile(function, backend="hybrid")(x), expected)
    assert generator.state == state


def test_checks_of_every_call_draw_once(generator: PhiloxGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify=always` runs eager beside the kernels: both have the same numbers, and the generator moves on by one run's."""
    monkeypatch.setenv("HYBRID_VERIFY", "always")

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(functional.gelu(x), 0.3, True)[0] + torch.rand_like(x)

    x = torch.randn(6, 40)
    expected = [function(x) for _ in range(3)]
    state = generator.state
    generator.state = (7, 0)
    fast = torch.compile(function, backend="hybrid")
    torch.testing.assert_close([fast(x) for _ in range(3)], expected)
    assert generator.state == state


def test_attention_with_a_random_mask(generator: PhiloxGenerator, drawn: list[str]) -> None:
    """A mask that attention computes as it needs it is the one that others read."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(40, 50) < 0.7
        return functional.scaled_dot_product_attention(q * 2, k, v, attn_mask=mask), mask.sum(1)

    q, k, v = (torch.randn(2, 3, rows, 16) for rows in (40, 50, 50))
    expected, state = [function(q, k, v) for _ in range(2)], generator.state
    generator.state = (7, 0)
    drawn.clear()
    fast = torch.compile(function, backend="hybrid")
    torch.testing.assert_close([fast(q, k, v) for _ in range(2)], expected, rtol=1e-5, atol=1e-5)
    assert generator.state == state
    assert drawn == ["uniform_"]  # of the first call's reference
