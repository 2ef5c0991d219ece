"""Running sums and products against eager."""

from __future__ import annotations

import math

import pytest
import torch

from loops.check import EVERYTHING, FLOATS, check, sample
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.lowerings.scans import MOST
from torch_hybrid_backend.loops.policy import Abilities

SCANS = Abilities(scans=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_cumsum(dtype: torch.dtype, dim: int) -> None:
    """Along any dimension; integers and booleans are summed in int64."""
    check(lambda a: a.cumsum(dim), sample(3, 5, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_cumprod(dtype: torch.dtype) -> None:
    """Products, too."""
    check(lambda a: a.cumprod(1), sample(3, 5, dtype=dtype, low=-2, high=2))


def test_result_dtype_counts_before_summing() -> None:
    """With `dtype` the elements are converted first."""
    check(lambda a: a.cumsum(0, dtype=torch.float64), sample(7, dtype=torch.int64))
    check(lambda a: a.cumsum(0, dtype=torch.int64), sample(7))
    check(lambda a: a.cumsum(0), torch.tensor(3.0))


def test_special_values_stay_behind() -> None:
    """NaN and infinities reach the elements after them, not those before."""
    x = torch.tensor([1.0, 2.0, math.inf, 3.0, -math.inf, 4.0, math.nan, 5.0])
    check(lambda a: a.cumsum(0), x)
    check(lambda a: a.cumprod(0), x)


def test_attention_positions() -> None:
    """Positions as language models make them from a mask."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    check(lambda m: (m.cumsum(-1) - 1).masked_fill(m == 0, 1), mask)


@pytest.mark.parametrize(
    ("shape", "dim", "taken"), [((1024,), 0, True), ((1025,), 0, False), ((8, 256), 0, True), ((32, 256), 1, False)]
)
def test_long_ones_are_refused(shape: tuple[int, ...], dim: int, taken: bool) -> None:
    """n times the work is too much for large n."""
    graph = torch.fx.symbolic_trace(lambda a: torch.ops.aten.cumsum.default(a, dim))
    source, scan = list(graph.graph.nodes)[:2]
    source.meta["val"] = scan.meta["val"] = torch.empty(shape)
    verdict = supports(scan)
    assert bool(verdict) == taken
    assert taken or verdict.code == Reason.ARGUMENT  # type: ignore[union-attr]
    assert (math.prod(shape) * shape[dim] <= MOST) == taken


_SCANS = {
    "cumsum": lambda a: a.cumsum(1),
    "cumprod": lambda a: a.cumprod(0),
    "cummax": lambda a: a.cummax(-1),
    "cummin": lambda a: a.cummin(0),
    "flipped": lambda a: a.flip(1).cumsum(1).flip(1) + 1,
}


@pytest.mark.parametrize("name", _SCANS)
@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_scans(name: str, dtype: torch.dtype) -> None:
    """Scans are one operation, for a backend that has kernels for it: extrema with the last of equal positions."""
    check(_SCANS[name], sample(4, 7, dtype=dtype), abilities=SCANS)


def test_special_values_in_scans() -> None:
    """A NaN stays, and so does its position; of equal infinities the sum of exponentials is that infinity."""
    x = torch.tensor(
        [[-math.inf, -math.inf, 1.0, 3.0, 3.0, math.inf, math.inf], [1.0, math.nan, 5.0, -1.0, math.nan, 0, 9]]
    )
    for function in (lambda a: a.cummax(1), lambda a: a.cummin(1), lambda a: a.logcumsumexp(1), lambda a: a.cumsum(1)):
        check(function, x, abilities=SCANS)
        check(function, x.double(), abilities=SCANS)
    check(lambda a: a.cummax(0), torch.tensor(3.0), abilities=SCANS)
    check(lambda a: a.logcumsumexp(0), torch.tensor(3.0), abilities=SCANS)


def test_running_extrema_need_scans() -> None:
    """Without them they are refused as operators that nothing is known of; long sums are taken with them."""
    graph = torch.fx.symbolic_trace(
        lambda a: torch.ops.aten.cumsum.default(torch.ops.aten.logcumsumexp.default(a, 0), 0)
    )
    source, exponentials, total = list(graph.graph.nodes)[:3]
    for node in (source, exponentials, total):
        node.meta["val"] = torch.empty(5000)
    verdict = supports(exponentials)
    assert verdict.code == Reason.UNKNOWN_OPERATOR  # type: ignore[union-attr]
    assert not supports(total)
    assert supports(exponentials, SCANS)
    assert supports(total, SCANS)
