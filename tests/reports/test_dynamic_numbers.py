"""Numbers and sizes that Dynamo takes for values known only at run time, from the second one on: each call has eager's result, and its region.

`verify` is off: the check of a first call would hide what a kernel gets wrong. `strict`: a region that is lost raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

OPTIONS = {"verify": "off", "strict": True}
INTEGERS = torch.arange(-37, 43).reshape(8, 10)
FLOATS = INTEGERS * 0.37
# A time stamp in milliseconds, a hash, an id: the first is small.
NUMBERS = (2, 3, 2147483653, 1099511627776, 1 << 62, -5, 0, -2147483650, -(1 << 62))


def _check(function: Callable[..., torch.Tensor], x: torch.Tensor, numbers: Sequence[Any]) -> None:
    """Each call with another number has eager's result to the last bit, but for the rounding of floats; none is left to eager as a whole."""
    compiled = torch.compile(function, backend="hybrid", options=OPTIONS)
    for number in numbers:
        given = number if isinstance(number, tuple) else (number,)
        actual, expected = compiled(x, *given), function(x, *given)
        exact = {} if expected.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            actual, expected, equal_nan=True, **exact, msg=lambda why, n=number: f"with {n}: {why}"
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x // n,
        lambda x, n: torch.div(x, n, rounding_mode="trunc"),
        lambda x, n: x % n,
        torch.fmod,
        lambda x, n: (torch.arange(50) - 20) // n,
        lambda x, n: (torch.arange(50) - 20) % n,
    ],
)
def test_integers_divided_by_a_number(function: Callable[..., torch.Tensor]) -> None:
    """A quotient is by the call's number, and by -1 only where the number is -1."""
    _check(function, INTEGERS, [n for n in (*NUMBERS, -1) if n])


@pytest.mark.parametrize("function", [lambda x, y: x // y.shape[0], lambda x, y: torch.fmod(x, y.shape[0])])
def test_integers_divided_by_a_size(function: Callable[..., torch.Tensor]) -> None:
    """A size is never -1: no quotient by it is a negation."""
    _check(function, INTEGERS, [torch.zeros(1).expand(size) for size in (3, 4, 5, 1 << 33)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x + n,
        lambda x, n: n - x,
        lambda x, n: x * n,
        lambda x, n: x > n,
        lambda x, n: x & n,
        lambda x, n: x ^ n,
        lambda x, n: x.clamp(min=n),
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: x.masked_fill(x > 0, n),
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: (x * n).sum(0),
        lambda x, n: torch.full((3,), n) + x[0, :3],
        lambda x, n: torch.tensor(n) + x,
        lambda x, n: torch.arange(n, n + 5) * 2,
        lambda x, n: torch.arange(5) * n,
        lambda x, n: torch.arange(5) * (1 << 40) < n,
        lambda x, n: x * (n // 3) + (2 * n + 1),
    ],
)
def test_an_integer_beyond_32_bits(function: Callable[..., torch.Tensor]) -> None:
    """An integer argument has all its 64 bits in every operator, whatever the first calls' were."""
    _check(function, INTEGERS, NUMBERS if function(INTEGERS, 1).shape != (10,) else NUMBERS[:4])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x + n,
        lambda x, n: x * n,
        lambda x, n: x.double() + n,
        lambda x, n: torch.threshold(x, n, n),
        lambda x, n: x.tril(n) * 2,
        lambda x, n: x.roll(n, 0) * 2,
        lambda x, n: torch.nn.functional.pad(x, (2, 1), value=n) * 2,
    ],
)
def test_an_integer_beside_floats(function: Callable[..., torch.Tensor]) -> None:
    """Floats meet the whole integer, which is rounded once; offsets and shifts may be any."""
    _check(function, FLOATS, NUMBERS)


def test_a_float_of_any_value() -> None:
    """Floats known only at run time may be infinite, NaN, huge and zero."""
    _check(lambda x, f: x * f, FLOATS, (1.5, 2.5, -0.0, float("nan"), float("inf"), -1e40))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x[n] + 1,
        lambda x, n: x.select(0, n) * 2,
        lambda x, n: x[n:] * 2,
        lambda x, n: x[:n] * 2,
        lambda x, n: x.narrow(0, n, 1) * 2,
        lambda x, n: torch.select_scatter(x, torch.ones(10), 0, n) * 2,
        lambda x, n: torch.slice_scatter(x, torch.ones(1, 10), 0, n, n + 1) * 2,
        lambda x, n: x[torch.arange(1) + n] * 2,
    ],
)
def test_a_position_from_the_end(function: Callable[..., torch.Tensor]) -> None:
    """A position below zero counts from the end in every call, and nothing outside of the tensor is read or written."""
    _check(function, FLOATS, (1, 2, 3, -2, -8, 7, 0))


def test_positions_in_tensors_of_other_lengths() -> None:
    """Positions and lengths may change together."""

    def function(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        return y[n:] * 2 + y[n] + x[0]

    _check(function, FLOATS, [(torch.randn(size, 10), n) for size, n in ((8, 1), (9, 2), (11, 3), (12, -3), (13, 12))])


@pytest.mark.parametrize(
    "function", [lambda x, n: x + n * n, lambda x, n: x * (n * n * 3), lambda x, n: x * n * n + n**3 // 7]
)
def test_only_a_power_of_an_integer_enters_a_region(function: Callable[..., torch.Tensor]) -> None:
    """A region that reads no more of an integer than its square keeps its kernels."""
    _check(function, INTEGERS, (2, 3, -70_000, 0))


def test_more_elements_than_32_bits_count_in_a_shape() -> None:
    """Sizes and products of them beyond 2^31 are numbers like others."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.numel() + y.shape[0]

    _check(function, INTEGERS, [torch.zeros(1, 1).expand(size, size + 1) for size in (3, 4, 70_000, 1 << 17)])


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_of_everything(training: bool) -> None:
    """Dropout with p=1 gives zeros, NaN for what is infinite, and draws nothing: what is drawn after it is eager's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 1.0) + torch.nn.functional.dropout(x, 0.5)

    compiled = torch.compile(function, backend="hybrid", options=OPTIONS | {"verify": "first"})
    results = []
    for call in (compiled, function):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        x[0, 0] = float("inf")
        x.requires_grad_(training)
        torch.manual_seed(3)
        result = call(x)
        if training:
            result.nan_to_num().sum().backward()
        results.append((result.detach(), x.grad if training else x, torch.get_rng_state()))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16), (torch.int64, torch.float32), (torch.int32, torch.int64)]
)
def test_a_linear_layer_of_several_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A linear layer that eager refuses raises eager's error, and no region is compiled for it."""
    x, weight = torch.ones(4, 8).to(dtypes[0]), torch.ones(3, 8).to(dtypes[1])
    with pytest.raises(RuntimeError) as eager:
        torch.nn.functional.linear(x, weight)
    with pytest.raises(RuntimeError, match=str(eager.value)[:30]):
        torch.compile(torch.nn.functional.linear, backend="hybrid", options=OPTIONS | {"verify": "first"})(x, weight)


@pytest.mark.full
def test_a_tensor_of_more_elements_than_32_bits_count() -> None:
    """A tensor of 2^31 elements and more (here 2 GiB of bytes) has its kernels: elementwise ones, sums, and positions from an index."""

    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[-8:] + 1, (x > 2).sum(), x[n] * 2

    x = torch.zeros((1 << 31) + 5, dtype=torch.int8)
    x[7], x[-3:] = 9, torch.tensor([1, 2, 3], dtype=torch.int8)
    n = torch.tensor([7, -1, (1 << 31) + 3])
    compiled = torch.compile(function, backend="hybrid", options=OPTIONS)
    last, count, taken = compiled(x, n)
    assert last.tolist() == [1, 1, 1, 1, 1, 2, 3, 4]
    assert count.item() == 2
    assert taken.tolist() == [18, 6, 4]
