"""Results lie in memory as eager's do, in every call, and `as_strided` reads what it reads in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as everyone writes it)
from torch import nn

CALLS = 3  # the first chooses engines, the second runs the plan

fault = pytest.mark.fault


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _agrees(function: Callable[..., object], *inputs: torch.Tensor, dynamic: bool | None = None) -> None:
    """Every call returns eager's values in eager's strides."""
    compiled = torch.compile(function, backend="hybrid", dynamic=dynamic)
    with torch.no_grad():
        expected = function(*inputs)
        for _ in range(CALLS):
            torch.testing.assert_close(compiled(*inputs), expected, check_stride=True)


PIXELS = _numbers(2, 4, 6, 5).to(memory_format=torch.channels_last)
PERMUTED = _numbers(5, 6, 4, 2).permute(3, 2, 1, 0)
BROADCAST = (_numbers(5, 1, 10).permute(2, 1, 0), _numbers(5, 10).t())
MATRIX = _numbers(6, 5).t()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.roll(x, -1, 0), (PIXELS,)),
        (lambda x: torch.roll(x, (1, 2), (2, 3)) * 2, (PIXELS,)),
        (lambda x: F.channel_shuffle(x, 2), (PIXELS,)),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)) + 1, (PERMUTED,)),
        (F.logsigmoid, (MATRIX,)),
        (torch.copysign, BROADCAST),
        (torch.floor_divide, BROADCAST),
        (torch.logical_xor, BROADCAST),
        (torch.heaviside, BROADCAST),
        (lambda x: torch.addr(x, x[:, 0], x[0], beta=0), (MATRIX,)),
        (lambda x, y: torch.logical_xor(x, y).float().exp(), BROADCAST),
    ],
    ids="roll rolled_twice shuffle batch_norm logsigmoid copysign floor_divide xor heaviside addr behind".split(),
)
def test_results_of_permuted_inputs(
    function: Callable[..., object], inputs: tuple[torch.Tensor, ...], dynamic: bool
) -> None:
    """Operators whose rules for fake tensors, or whose decompositions, say other strides than eager's kernels return eager's."""
    _agrees(function, *inputs, dynamic=dynamic)


@fault("`as_strided` reads an intermediate value of permuted inputs", "eager's values")
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.roll(x, -1, 0), (PIXELS,)),
        (lambda x: F.channel_shuffle(x, 2).relu(), (PIXELS,)),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), (PERMUTED,)),
        (torch.copysign, BROADCAST),
        (lambda x, y: torch.floor_divide(x, y).exp(), BROADCAST),
    ],
    ids="roll shuffle batch_norm copysign floor_divide".split(),
)
def test_as_strided_behind_an_operator(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    """`as_strided` of an intermediate value finds that value's elements where eager puts them."""
    _agrees(lambda *given: torch.as_strided(function(*given), (5, 10), (4, 1), 0) + 1, *inputs)


@fault("`as_strided` reads elements that a slice leaves out", "eager's values")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.as_strided(x.repeat((3, 2))[:, ::2], (3, 2), (2, 1)),
        lambda x: torch.as_strided((x * 3)[:, 1::2], (3, 2), (2, 1)),
        lambda x: torch.as_strided((x + 1).t()[1:, ::2], (3, 3), (3, 1)).sin(),
        lambda x: torch.as_strided(x.exp().select(0, 1), (2, 3), (3, 1), 2),
        lambda x: torch.as_strided((x * 2).diagonal(), (3, 2), (2, 1)),
    ],
    ids="repeat slice transposed select diagonal".split(),
)
def test_as_strided_of_a_slice(function: Callable[..., torch.Tensor], dynamic: bool) -> None:
    """`as_strided` of a slice reads the memory between the slice's elements."""
    _agrees(function, _numbers(4, 6), dynamic=dynamic)


@pytest.mark.parametrize("offset", [0, 6])
def test_as_strided_of_a_slice_of_an_input(offset: int) -> None:
    """So it does where the slice is of an input that begins anywhere in its memory, and kernels read the slice too."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = x[:, 1::2]
        return torch.as_strided(part, (3, 2), (2, 1)).sin() + 1, part.exp() * 2

    compiled = torch.compile(program, backend="hybrid")
    memory = _numbers(6 * 6)
    with torch.no_grad():
        for begin in (0, offset, 0):
            x = memory[begin : begin + 24].view(4, 6)
            for _ in range(CALLS):
                torch.testing.assert_close(compiled(x), program(x), check_stride=True)


def test_strides_of_training() -> None:
    """Results and gradients of a training step lie as in eager."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ChannelShuffle(2)).to(
        memory_format=torch.channels_last
    )
    compiled = torch.compile(model, backend="hybrid")

    def step(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = PIXELS.clone().requires_grad_()
        result = call(x)
        return [result, *torch.autograd.grad(result.square().sum(), [x, *model.parameters()])]

    for _ in range(CALLS):
        torch.testing.assert_close(step(compiled), step(model), check_stride=True, rtol=1e-4, atol=1e-4)


def test_strides_of_graphs_that_a_process_kept() -> None:
    """A graph that is kept between processes has the strides that it was traced with."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(torch.roll(x, -1, 0), (5, 10), (4, 1), 0) * 2

    for _ in range(2):
        torch.compiler.reset()
        _agrees(program, PIXELS)
