"""The Python executor: what a plan means, segment by segment."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.region import PartitionedGraph, Segment
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.python_executor import PythonExecutor, checked

X = torch.randn(4, 6)


def graph_of(function: Callable[..., object], *inputs: Any, mode: str = "fake") -> PartitionedGraph:
    """The function cut into segments, one at each sort."""
    return partition_graph(
        make_fx(function, tracing_mode=mode)(*inputs), [FakeEngine(refuses=["sort"])], Config()
    ).graph


def eager_segments(graph: PartitionedGraph) -> list[Callable[[Sequence[Any]], list[Any]]]:
    return [segment.region.eager for segment in graph.segments]


def _sorted_twice(x: torch.Tensor) -> tuple[Any, ...]:
    y = torch.sort(x @ x.t())[0]
    z = torch.sort(y.t() @ x)[0]
    return z @ z.t(), y, x, None, 3, x.t()


def test_segments_are_run_in_order() -> None:
    """Values go from segment to segment; inputs, literals and views come out as in eager, and nothing records gradients."""
    graph = graph_of(_sorted_twice, X)
    assert len(graph.segments) == 5
    executor = PythonExecutor(graph, eager_segments(graph))
    x = torch.nn.Parameter(X.clone())
    for given in (X, X * 3, x):
        results, expected = executor([given]), _sorted_twice(given)
        torch.testing.assert_close(results, list(expected), check_stride=True)
        assert results[2] is given
        assert results[5].data_ptr() == given.data_ptr()
        assert not results[0].requires_grad
    with ThreadPoolExecutor(4) as pool:
        several = [X + seed for seed in range(8)]
        for given, results in zip(several, pool.map(lambda x: executor([x]), several), strict=True):
            torch.testing.assert_close(results, list(_sorted_twice(given)))


def test_each_run_can_be_watched() -> None:
    """A hook runs each segment in the executor's place, in order and with its inputs; what it returns is what goes on."""
    graph = graph_of(_sorted_twice, X)
    seen: list[tuple[int, tuple[str, ...]]] = []

    def watch(index: int, part: Segment, inputs: Sequence[Any]) -> Sequence[Any]:
        seen.append((index, part.inputs))
        return [-result for result in part.region.eager(inputs)] if index == 4 else part.region.eager(inputs)

    def refuse(_: Sequence[Any]) -> list[Any]:
        raise AssertionError("the hook stands in for the segment")

    results = PythonExecutor(graph, [refuse] * 5).run([X], watch)
    torch.testing.assert_close(results[0], -_sorted_twice(X)[0])
    assert seen == [(index, segment.inputs) for index, segment in enumerate(graph.segments)]


def test_values_die_after_their_last_use() -> None:
    """Memory is freed before the segment after the last reader runs, unless the graph returns the value."""
    graph = graph_of(lambda x: (torch.sort(torch.sort(x @ x)[0] @ x)[0] @ x,), X[:, :4])
    made: list[weakref.ref[torch.Tensor]] = []

    def watch(index: int, part: Segment, inputs: Sequence[Any]) -> Sequence[Any]:
        assert [ref() is None for ref in made] == [k < index - 1 for k in range(len(made))]
        results = part.region.eager(inputs)
        made.append(weakref.ref(results[0]))
        return results

    results = PythonExecutor(graph, eager_segments(graph)).run([X[:, :4]], watch)
    assert [ref() is None for ref in made] == [True] * 4 + [False]
    assert results[0] is made[-1]()


def _folded_graph() -> PartitionedGraph:
    """The graph of x, w + 1 and w.t(); the last two are folded."""
    return graph_of(lambda x, a, b: (x @ a, a, b, torch.sort(b)[0]), X, torch.ones(6, 6), torch.ones(6, 6))


def test_folding_follows_the_parameters() -> None:
    """Folded values are kept while the parameter stays as it is; results that are such values are copies for the caller to write to."""
    graph = _folded_graph()
    folds = 0

    def fold(raw: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal folds
        folds += 1
        return [raw[0] + 1, raw[0].t()]

    hoisted = HoistedInputs((CallInput(1), FoldedValue(0), FoldedValue(1)), (0,))
    executor = PythonExecutor(graph, eager_segments(graph), hoisted, fold)
    w = torch.nn.Parameter(torch.randn(6, 6))
    for expected_folds in (1, 2):
        for _ in range(2):
            now = w.detach().clone()
            product, a, b, ordered = executor([w, X])
            torch.testing.assert_close([product, a, b], [X @ (now + 1), now + 1, now.t()], check_stride=True)
            torch.testing.assert_close(ordered, torch.sort(now.t())[0])
            assert folds == expected_folds
            a.zero_()
            b.zero_()
            torch.testing.assert_close(w.detach(), now)
        w.data.mul_(-2)
    with pytest.raises(HybridError, match="no function to fold"):
        PythonExecutor(graph, eager_segments(graph), hoisted)([w, X])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: [*results, results[0]], "returned 2 values instead of 1"),
        (lambda results: [], "returned 0 values instead of 1"),
        (lambda results: [results[0][1:]], r"TensorSpec\(shape=\(3, 4\).* instead of TensorSpec\(shape=\(4, 4\)"),
        (lambda results: [results[0].double()], "float64.* instead of .*float32"),
        (lambda results: [None], "returned None instead of a tensor"),
    ],
)
def test_results_that_do_not_fit_are_named(change: Callable[[list[Any]], list[Any]], message: str) -> None:
    """Number, shape and dtype are checked against the region; the error says what came and what was due."""
    graph = graph_of(lambda x: (x @ x.t(),), X)
    (segment,) = graph.segments
    with pytest.raises(HybridError, match=rf"region {segment.region.name} .*{message}"):
        PythonExecutor(graph, [lambda inputs: change(segment.region.eager(inputs))])([X])


def test_results_get_the_strides_of_their_specs() -> None:
    """An engine that returns another layout is made to fit: what was compiled upon the strides reads the right elements."""
    (segment,) = graph_of(lambda x: (x @ x.t(),), X).segments
    value = torch.randn(4, 4)
    (result,) = checked(segment, [value.t()])
    assert result.stride() == (4, 1)
    assert torch.equal(result, value.t())
    assert checked(segment, [value])[0] is value  # no copy where nothing is to be done
    dynamic = dataclasses.replace(
        segment.region, outputs=(dataclasses.replace(TensorSpec.of(value), strides=(graph_size(), 1)),)
    )
    assert checked(dataclasses.replace(segment, region=dynamic), [value.t()])[0].stride() == (1, 4)


def graph_size() -> Any:
    """A size known only at run time."""
    graph = graph_of(lambda x: (x + 1,), X, mode="symbolic")
    spec = graph.segments[0].region.outputs[0]
    assert spec is not None
    return spec.shape[0]


def test_any_sizes_and_numbers() -> None:
    """An executor runs a graph of symbolic sizes at each of them; sizes are values like others."""

    def function(x: torch.Tensor) -> tuple[Any, ...]:
        y = torch.sort(x @ x.t())[0]
        return y[: x.shape[0] // 2], x.shape[0] + x.shape[1]

    graph = graph_of(function, X, mode="symbolic")
    executor = PythonExecutor(graph, eager_segments(graph))
    for shape in ((4, 6), (7, 2), (1, 1)):
        x = torch.randn(shape)
        (half, total), expected = executor([x]), function(x)
        torch.testing.assert_close(half, expected[0])
        assert total == expected[1]


def test_profilers_see_segments_by_their_titles() -> None:
    """Each segment is a range of that name in a profiler's timeline, in order; one without a title is none."""
    graph = graph_of(_sorted_twice, X)
    titles = ["first", "", "third", "fourth", "last"]
    executor = PythonExecutor(graph, eager_segments(graph), titles=titles)
    with torch.profiler.profile() as profile:
        executor([X])
    ranges = sorted((event.time_range.start, event.name) for event in profile.events() if event.name in titles)
    assert [name for _, name in ranges] == ["first", "third", "fourth", "last"]
