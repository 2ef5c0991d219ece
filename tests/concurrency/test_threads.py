"""Threads that share compiled models, compile while others run, and change the number of threads."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.leaks import resident_bytes
from benchmarks.networks import SmallCnn, SmallTransformer
from tests.concurrency.conftest import run_together

_compile = functools.partial(torch.compile, backend="hybrid")
_THREADS = 8


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _calls(model: Callable[..., torch.Tensor], x: torch.Tensor, expected: torch.Tensor, count: int) -> None:
    with torch.no_grad():  # grad mode is each thread's own
        for _ in range(count):
            _close(model(x), expected)


def _images(number: int) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def model() -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(0)
    return SmallCnn().eval()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.full)])
def test_one_model(model: nn.Module, count: int) -> None:
    """Eight threads call one compiled model, from its first call on: each gets the result of its own input."""
    compiled = _compile(model)
    with torch.no_grad():
        expected = [model(_images(i)) for i in range(_THREADS)]
    run_together([functools.partial(_calls, compiled, _images(i), expected[i], count) for i in range(_THREADS)])


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.full)])
def test_a_model_each(model: nn.Module, count: int) -> None:
    """Eight threads call, and first compile, eight instances of one class, each with weights of its own."""
    models = [copy.deepcopy(model) for _ in range(_THREADS)]
    with torch.no_grad():
        for number, each in enumerate(models):
            each.head.bias.add_(number)
        expected = [each(_images(0)) for each in models]
    compiled = [_compile(each) for each in models]
    run_together([functools.partial(_calls, compiled[i], _images(0), expected[i], count) for i in range(_THREADS)])


def test_different_models(model: nn.Module) -> None:
    """Two models of different kinds, called by four threads each."""
    transformer = SmallTransformer().eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        one, other = model(_images(0)), transformer(tokens)
    calls = [
        functools.partial(_calls, _compile(model), _images(0), one, 50),
        functools.partial(_calls, _compile(transformer), tokens, other, 50),
    ]
    run_together(calls * 4)


def test_compilation_beside_calls(model: nn.Module) -> None:
    """While four threads call a compiled model, four others compile functions that are new, with kernels of their own."""
    compiled = _compile(model)
    with torch.no_grad():
        expected = model(_images(0))
        _close(compiled(_images(0)), expected)

    def compile_new(thread: int) -> None:
        x = torch.linspace(-1, 1, 64)
        for number in range(3):
            factor = 1.5 + thread + number / 8

            def function(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
                return torch.sin(x * factor) + torch.relu(x)

            _close(_compile(function)(x), function(x))

    run_together(
        [functools.partial(_calls, compiled, _images(0), expected, 100)] * 4
        + [functools.partial(compile_new, thread) for thread in range(4)]
    )


def test_training_in_threads() -> None:
    """Threads that train models of their own at once get the gradients that eager gets alone."""
    torch.manual_seed(0)
    models = [SmallTransformer() for _ in range(4)]
    tokens = torch.arange(24).reshape(2, 12)
    expected = [copy.deepcopy(each) for each in models]
    for each in expected:
        each(tokens).square().sum().backward()

    compiled = [
        _compile(each) for each in models
    ]  # here: two threads that name a backend first, at once, are an error in PyTorch

    def train(number: int) -> None:
        for _ in range(5):
            models[number].zero_grad()
            compiled[number](tokens).square().sum().backward()

    run_together([functools.partial(train, number) for number in range(4)])
    for mine, theirs in zip(models, expected, strict=True):
        for ours, reference in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert reference.grad is not None
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-3, atol=1e-4)


def test_weights_change_beside_calls(model: nn.Module) -> None:
    """While one thread writes the same values into the weights again and again, so that they are packed anew, others get right results."""
    compiled = _compile(model)
    with torch.no_grad():
        expected = model(_images(0))

    def write() -> None:
        with torch.no_grad():
            for _ in range(50):
                for parameter in model.parameters():
                    parameter.mul_(1.0)

    run_together([functools.partial(_calls, compiled, _images(0), expected, 50)] * 3 + [write])


def test_number_of_threads_changes(model: nn.Module) -> None:
    """`torch.set_num_threads` counts from the next call on, up and down, and changes no result."""
    before = torch.get_num_threads()
    compiled = _compile(model)
    with torch.no_grad():
        expected = model(_images(0))
        try:
            for count in (2, 1, 4, 3, 1, 2):
                torch.set_num_threads(count)
                _close(compiled(_images(0)), expected)
        finally:
            torch.set_num_threads(before)


def test_memory_is_flat(model: nn.Module) -> None:
    """Threads that come and go leave nothing behind: their arenas and scratch memory are used again or freed."""
    compiled = _compile(model)
    with torch.no_grad():
        expected = model(_images(0))

    def round_of_threads() -> None:
        run_together([functools.partial(_calls, compiled, _images(0), expected, 10)] * _THREADS)

    for _ in range(5):
        round_of_threads()
    before = resident_bytes()
    for _ in range(20):
        round_of_threads()
    grown = resident_bytes() - before
    # One call's arena, packed weights and outputs are about 200 KiB: a leak per thread would be 160 of them, 32 MiB.
    assert grown < 8 << 20, f"{grown} bytes"


def test_a_collected_model_frees_its_memory() -> None:
    """Packed weights and arena go with the compiled model."""
    x = torch.randn(4, 2048)
    weight_bytes = 2048 * 2048 * 4

    def use_one() -> None:
        torch.compiler.reset()
        model = nn.Linear(2048, 2048).eval()
        with torch.no_grad():
            _compile(model)(x)

    use_one()
    torch.compiler.reset()
    gc.collect()
    before = resident_bytes()
    for _ in range(4):
        use_one()
    torch.compiler.reset()

    def grown_bytes() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed blocks of this size below others that are in use
        return resident_bytes() - before

    # Threads of earlier tests may end only now.
    until = time.monotonic() + 10
    while (grown := grown_bytes()) >= weight_bytes and time.monotonic() < until:
        time.sleep(0.1)
    large = [
        each.shape
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter) and each.nbytes >= weight_bytes
    ]
    assert grown < weight_bytes, (
        f"{grown} bytes more after four models with {weight_bytes} bytes of weights each; alive: {large}"
    )
