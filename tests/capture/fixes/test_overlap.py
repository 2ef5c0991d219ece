"""Arguments that overlap in other ways than when the graph was compiled: who runs the call, and that the result is eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph


class Counting:
    """Compiles through capture alone and counts the calls of compiled graphs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def compile_graph(captured: CapturedGraph) -> Callable[[list[Any]], Any]:
            def run(given: list[Any]) -> Any:
                self.runs += 1
                return captured.graph_module(*given)

            return run

        return capture(gm, inputs, compile_graph, ())


@pytest.fixture
def counting() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def _apart() -> list[torch.Tensor]:
    return [torch.arange(6.0), torch.arange(6.0) + 10]


def _overlapping(second: int = 2, room: int = 20) -> list[torch.Tensor]:
    """Two vectors of six numbers in one storage; the second begins `second` numbers after the first."""
    memory = torch.arange(float(room))
    return [memory[:6], memory[second : second + 6]]


def _every_second(shared: bool) -> list[torch.Tensor]:
    """The numbers at even places of a storage and those at odd ones, of the same or of another."""
    memory = torch.arange(12.0)
    return [memory[::2], (memory if shared else memory.clone())[1::2]]


def _write_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _write_second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.neg_()
    return x * y


def _write_nothing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


def _runs(counting: Counting, function: Callable[..., Any], *calls: Sequence[torch.Tensor]) -> list[int]:
    """Calls the function on each list of arguments, compares results and arguments with eager's, and says how often a compiled graph ran."""
    compiled = torch.compile(function, backend=counting)
    counted = []
    for given in calls:
        expected = copy.deepcopy(given)  # keeps what shares memory so
        before = counting.runs
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), function(*expected), rtol=0, atol=0)
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
        counted.append(counting.runs - before)
    return counted


@pytest.mark.parametrize("function", [_write_first, _write_second])
def test_compiled_apart(counting: Counting, function: Callable[..., Any]) -> None:
    """A call whose arguments come to lie in each other's memory runs in eager; later ones that lie apart run compiled again."""
    assert _runs(counting, function, _apart(), _overlapping(), _overlapping(0), _apart()) == [1, 0, 0, 1]


def test_neighbours_in_one_storage_do_not_overlap(counting: Counting) -> None:
    """Compiled code is right where the first ends before the second begins; an element more, and it may not be."""
    assert _runs(counting, _write_first, _apart(), _overlapping(6), _overlapping(5), _overlapping(7)) == [1, 1, 0, 1]


def test_interleaved_arguments_count_as_overlapping(counting: Counting) -> None:
    """Memory between another's elements may be anyone's: eager runs it, which is always right."""
    assert _runs(counting, _write_first, _every_second(False), _every_second(True)) == [1, 0]


def test_what_is_only_read_may_overlap(counting: Counting) -> None:
    """A function that writes to no argument runs compiled, however its arguments lie."""
    assert _runs(counting, _write_nothing, _apart(), _overlapping(), _overlapping(0)) == [1, 1, 1]


def test_compiled_overlapping(counting: Counting) -> None:
    """Compiled for two parts of one storage, a call runs so only where they lie at the same places of a storage as large."""
    calls = [_overlapping(), _overlapping(), _overlapping(3), _overlapping(room=24), _overlapping()]
    assert _runs(counting, _write_first, *calls) == [1, 1, 0, 0, 1]


def test_parameters_do_not_count(counting: Counting) -> None:
    """Parameters are their module's own; an argument that is written to next to them changes nothing."""
    layer = torch.nn.Linear(3, 3, bias=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return layer(x)

    assert _runs(counting, function, [torch.ones(2, 3)], [torch.zeros(2, 3)]) == [1, 1]


def test_empty_arguments_overlap_nothing(counting: Counting) -> None:
    """No element is written, so none is seen."""

    def empty() -> list[torch.Tensor]:
        memory = torch.arange(8.0)
        return [memory[:6], memory[2:2]]

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y.sum()

    assert _runs(counting, function, [torch.arange(6.0), torch.empty(0)], empty()) == [1, 1]
