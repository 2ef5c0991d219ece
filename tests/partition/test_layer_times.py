"""Times of layers, from the times of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.partition.layer_times import float32_rate, layer_us, least_us, worth_mixing

_LAYERS = {"mm", "mm_1"}
_WRITTEN = {"arg0_1", "mm", "relu", "mm_1", "add"}


def _reduced(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.mm(x.bfloat16(), v)  # _to_copy, mm
    return (torch.mm(y.relu(), w) + 1).float()  # relu, mm_1, add, _to_copy_1


def _graph() -> torch.fx.Graph:
    x, v, w = torch.randn(4, 8), torch.randn(8, 8).bfloat16(), torch.randn(8, 24).bfloat16()
    return trace(_reduced, x, v, w).graph


def _parts(**times: float) -> list[tuple[frozenset[str], float]]:
    return [(frozenset(names.split("__")), us) for names, us in times.items()]


def test_what_lies_between_layers_belongs_to_one() -> None:
    """Casts to the layer behind them, or before them where there is none behind; all else to the one before."""
    found = layer_us(
        _graph(), _LAYERS, _WRITTEN, _parts(_to_copy=1.0, mm=10.0, relu=100.0, mm_1__add=1000.0, _to_copy_1=10000.0)
    )
    assert found == {"mm": 111.0, "mm_1": 11000.0}


def test_kernels_of_several_layers_are_shared_by_their_products() -> None:
    """The second has three times the first one's; names that the graph does not have are nobody's, and layers without kernels have no time."""
    assert layer_us(_graph(), _LAYERS, _WRITTEN, _parts(mm__relu__mm_1=8.0)) == {"mm": 2.0, "mm_1": 6.0}
    assert layer_us(_graph(), _LAYERS, _WRITTEN, _parts(relu=2.0, other=5.0)) == {"mm": 2.0}


def test_the_least_time_of_float32() -> None:
    """Products at the given rate; convolutions with a window may multiply less, and tiles multiply faster."""
    mm = trace(torch.mm, torch.randn(10, 20), torch.randn(20, 30)).graph
    assert least_us(mm, 100.0, has_tiles=False) == pytest.approx(2 * 10 * 20 * 30 / 100)
    assert least_us(mm, 100.0, has_tiles=True) < least_us(mm, 100.0, has_tiles=False) / 2

    def times(size: int) -> float:
        graph = trace(torch.conv2d, torch.randn(1, 4, 16, 16), torch.randn(8, 4, size, size)).graph
        return least_us(graph, 1.0, has_tiles=False)

    assert times(1) == 2 * 8 * 4 * 16 * 16
    assert times(3) == pytest.approx(2 * 8 * 4 * 9 * 14 * 14 / 2.25)


def test_the_rate_of_float32() -> None:
    """A product of 2048 x 2048 in 2 ms are 8.6 TFLOP/s."""
    called: list[object] = []
    assert float32_rate(lambda call: called.append(call()) or 2000.0) == pytest.approx(2 * 2048**3 / 2000)
    assert torch.equal(called[0][0, :3], torch.full((3,), 2048.0))  # type: ignore[index]


@pytest.mark.parametrize(
    ("own", "written", "slow"),
    [
        ({"a": 10.0, "b": 10.0}, {"a": 5.0, "b": 20.0}, {"a"}),
        ({"a": 10.0, "b": 10.0}, {"a": 9.9, "b": 20.0}, set()),  # noise
        ({"a": 10.0, "b": 1000.0}, {"a": 5.0, "b": 2000.0}, set()),  # not worth another graph
        ({"a": 10.0, "b": 10.0}, {"a": 5.0, "b": 5.0}, set()),  # the graph as written is that one
        ({"a": 10.0, "b": 10.0}, {"b": 20.0}, set()),  # nothing is known of one
        ({}, {}, set()),
    ],
)
def test_which_layers_are_worth_a_graph_of_their_own(
    own: dict[str, float], written: dict[str, float], slow: set[str]
) -> None:
    """Those that lose, where that shows in the whole."""
    assert worth_mixing(own, written, 0.05) == slow
