"""Results that share memory in eager share it when compiled: a write to one is seen through the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_hybrid_backend.backend import compile_graph, explain
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.lazy_bits import LazyBits

Function = Callable[..., Sequence[torch.Tensor]]


def _compiled(function: Function, cache_dir: Path, *, dynamic: bool = False) -> Function:
    torch._dynamo.reset()
    config = Config(cache_dir=cache_dir, placement="estimate", strict=True)
    return torch.compile(function, backend=partial(compile_graph, config=config), dynamic=dynamic, fullgraph=True)


def _rows(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    return [y[0], y[1:].t(), y]


def _cut(x: torch.Tensor) -> list[torch.Tensor]:
    first, second = (x + 1).chunk(2, 1)
    return [second, first.unflatten(0, (-1, 1))]


def _as_bits(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    return [y.view(torch.int32)[1:], y]


def _conjugated(x: torch.Tensor) -> list[torch.Tensor]:
    y = torch.complex(x, x * 2)
    return [y.mH, y[1:], y.conj().imag]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_rows, _cut, _as_bits, _conjugated])
def test_views_of_an_intermediate_value(function: Function, dynamic: bool, tmp_path: Path) -> None:
    """All results of equal memory in eager are so when compiled, at the traced sizes and at others, where sizes are symbols."""
    run = _compiled(function, tmp_path, dynamic=dynamic)
    for rows in (4, 4, 6):
        x = torch.arange(rows * 6.0).view(rows, 6)
        results, expected = run(x), function(x)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)
            assert result.stride() == wanted.stride()
            assert LazyBits.of(result) == LazyBits.of(wanted)
            assert result.untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr()
        results[0].fill_(7)
        expected[0].fill_(7)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("mutates", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_input_that_begins_within_its_memory(dynamic: bool, mutates: bool) -> None:
    """Views lie in the input's memory, at their place in it, though the graph's own outputs have memory of their own; also where the new value
    of another input is one of those."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        if mutates:
            y.mul_(2)
        return [y * 2, x.unflatten(-1, (2, -1)), x.t()[1:]]

    def compiled(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        return lambda inputs: [
            value.clone() if isinstance(value, torch.Tensor) else value for value in captured.graph_module(*inputs)
        ]

    torch._dynamo.reset()
    backend = partial(capture, compile_graph=compiled, keep_ops=())
    run = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows in (3, 3, 5):
        x, y = torch.arange(6.0 * rows + 7)[7:].view(rows, 6), torch.ones(rows, 2)
        for result, wanted in zip(run(x, y.clone()), function(x, y.clone()), strict=True):
            torch.testing.assert_close(result, wanted, check_stride=True)
            assert result.storage_offset() == wanted.storage_offset()
            assert (result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (
                wanted.numel() > 2 * rows
            )


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_input_under_training(dynamic: bool, tmp_path: Path) -> None:
    """Pieces of an input, which AOTAutograd leaves to the graph where gradients flow, lie in the input's memory."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        first, second = x.split(2)
        return [second[:, 1:], first, x @ w]

    run = _compiled(function, tmp_path, dynamic=dynamic)
    for columns in (3, 3, 5):
        room = torch.arange(5.0 * columns).view(5, columns)
        x, w = room[1:].requires_grad_(), torch.ones(columns, 2, requires_grad=True)
        results = run(x, w)
        for result, wanted in zip(results, function(x, w), strict=True):
            torch.testing.assert_close(result, wanted)
        assert [t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in results] == [
            True,
            True,
            False,
        ]
        (gradient,) = torch.autograd.grad(sum(t.sum() for t in results), [x])
        (wanted,) = torch.autograd.grad(sum(t.sum() for t in function(x, w)), [x])
        torch.testing.assert_close(gradient, wanted)
        with torch.no_grad():
            x.zero_()
        assert not results[0].any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_input_in_inference(dynamic: bool, tmp_path: Path) -> None:
    """Views begin where eager's do, also where that is known only at run time and the input itself begins inside of its memory."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        half = x.shape[0] // 2
        return [x[half:], x.chunk(2, 0)[-1].t(), x.narrow(1, 1, 2).unflatten(0, (-1, 2)), x + 1, x[1:][half - 1 :]]

    run = _compiled(function, tmp_path, dynamic=dynamic)
    for rows in (4, 4, 6) if dynamic else (4, 4):
        x = torch.arange(rows * 6.0 + 12).view(rows + 2, 6)[2:]
        for result, wanted in zip(run(x), function(x), strict=True):
            torch.testing.assert_close(result, wanted)
            assert (result.stride(), result.storage_offset()) == (wanted.stride(), wanted.storage_offset())
            is_view = wanted.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert (result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == is_view
        run(x)[0].fill_(7)
        assert bool((x[rows // 2 :] == 7).all())


def test_no_engine_copies_views_of_inputs(tmp_path: Path) -> None:
    """A region computes no views of inputs, as nobody would read them."""
    torch._dynamo.reset()
    options = {"placement": "estimate", "cache_dir": str(tmp_path)}
    with torch.no_grad():
        found = explain(lambda x: (x[1:], x + 1), torch.randn(4, 6), options=options, dynamic=True)
    assert [
        kernel for plan in found.plans for region in plan.regions for kernel in region.kernels if "add" not in kernel
    ] == []
    assert sum(len(plan.regions) for plan in found.plans) == 1
