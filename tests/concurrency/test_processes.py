"""Processes: forked after compilation, spawned, DataLoader workers beside and inside."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.networks import SmallCnn
from tests.concurrency.conftest import DEADLINE_S

_compile = functools.partial(torch.compile, backend="hybrid")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def _images(number: int = 0) -> torch.Tensor:
    # Large enough for eager and kernels alike to use several threads.
    return torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(number))


def _serve(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send(function(*arguments))
    except BaseException as error:  # the parent raises it
        connection.send(error)


def _in_process(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in another process. Raises what it raises, or TimeoutError for one that hangs."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"the {method}ed process gave no answer within {DEADLINE_S:.0f} s")
        result = ours.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture
def threads() -> Iterator[None]:
    """At least two threads in the parent, whatever the machine: a fork without them shows nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(threads: None) -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(0)
    return SmallCnn().eval()


def _called(model: Callable[..., torch.Tensor], x: torch.Tensor) -> list[float]:
    with torch.no_grad():
        values: list[float] = model(x).flatten().tolist()
    return values


def test_a_forked_child_calls_the_model(model: nn.Module) -> None:
    """A compiled model that was in use before the fork gives its results in the child, and in the parent after it."""
    compiled = _compile(model)
    expected = _called(model, _images())
    assert _called(compiled, _images()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert _in_process("fork", _called, compiled, _images()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert _called(compiled, _images()) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def _compiled_anew(x: torch.Tensor) -> list[float]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3, dim=-1) + torch.tanh(x)

    return _called(_compile(function), x)


def test_a_forked_child_compiles(model: nn.Module) -> None:
    """A child compiles something new, with kernel compilers of its own, while the parent keeps its."""
    x = torch.linspace(-1, 1, 4096).reshape(64, 64)
    _called(_compile(model), _images())
    expected = (torch.softmax(x * 3, dim=-1) + torch.tanh(x)).flatten().tolist()
    assert _in_process("fork", _compiled_anew, x) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def _eager_in_child(x: torch.Tensor) -> list[float]:
    return ((x @ x.T) + 1).sum(dim=1).tolist()  # type: ignore[no-any-return]


def test_eager_works_in_a_forked_child(model: nn.Module) -> None:
    """Large eager operators work in a forked child where the runtime is loaded: regions may be eager's."""
    _called(_compile(model), _images())
    x = torch.randn(512, 512)
    assert _in_process("fork", _eager_in_child, x) == pytest.approx(_eager_in_child(x), rel=1e-3, abs=1e-3)


def test_an_uncompiled_model_forks(model: nn.Module) -> None:
    """A model wrapped by torch.compile but not called before the fork is compiled in the child."""
    assert _in_process("fork", _called, _compile(model), _images()) == pytest.approx(
        _called(model, _images()), rel=1e-4, abs=1e-5
    )


class _Numbered(Dataset[torch.Tensor]):
    """Images by number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        return _images(number)[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_data_loader_workers(model: nn.Module, method: str) -> None:
    """A compiled model is called while DataLoader workers, started after its first call, prepare the next batches."""
    compiled = _compile(model)
    loader = DataLoader(_Numbered(), batch_size=4, num_workers=2, multiprocessing_context=method, timeout=DEADLINE_S)
    _called(compiled, _images()[:4])
    for _ in range(2):
        for batch in loader:
            assert _called(compiled, batch) == pytest.approx(_called(model, batch), rel=1e-4, abs=1e-5)


class _Encoded(IterableDataset[torch.Tensor]):
    """A data set that encodes images by a compiled model, in the worker."""

    def __init__(self, model: Callable[..., torch.Tensor]) -> None:
        self.model = model

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(3):
            with torch.no_grad():
                yield self.model(_images(number))


def test_a_compiled_model_in_a_data_loader_worker(model: nn.Module) -> None:
    """A dataset that calls a compiled model works in forked workers, which the parent used before."""
    compiled = _compile(model)
    _called(compiled, _images())
    loader = DataLoader(
        _Encoded(compiled), batch_size=None, num_workers=1, timeout=DEADLINE_S, multiprocessing_context="fork"
    )
    for number, outputs in enumerate(loader):
        assert outputs.flatten().tolist() == pytest.approx(_called(model, _images(number)), rel=1e-4, abs=1e-5)


def _built_and_called() -> list[float]:
    torch.manual_seed(0)
    return _called(_compile(SmallCnn().eval()), _images())


def test_a_spawned_process(model: nn.Module) -> None:
    """A spawned process compiles for itself, from the same cache."""
    assert _in_process("spawn", _built_and_called) == pytest.approx(_called(model, _images()), rel=1e-4, abs=1e-5)


def _trained(rank: int, results: Any) -> None:
    model = SmallCnn()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01 * (rank + 1))
    _compile(model)(_images()).sum().backward()
    assert model.head.bias.grad is not None
    results.put((rank, model.head.bias.grad.tolist()))


@pytest.mark.full
def test_torch_multiprocessing() -> None:
    """Two processes of torch.multiprocessing compile and train the same model at once, with one cache."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    spawned = torch.multiprocessing.start_processes(_trained, (results,), nprocs=2, join=False, start_method="spawn")
    while not spawned.join(timeout=DEADLINE_S):
        pass
    found = dict(results.get() for _ in range(2))
    assert found == {0: [8.0] * 10, 1: [8.0] * 10}
