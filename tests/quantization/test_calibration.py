"""Ranges of activations: thresholds against a plain reference, histograms that grow, and what is no calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.calibration import (
    Collector,
    Entropy,
    MinMax,
    best_threshold,
    collector_of,
    least_threshold,
)


def _reference(counts: list[float], levels: int) -> int:
    """The published algorithm, bin by bin."""
    middle, best, least = len(counts) // 2, len(counts) // 2, math.inf
    for reach in range(levels // 2, middle + 1):
        start, stop = middle - reach, middle + reach + 1
        kept = counts[start:stop]
        p = list(kept)
        p[0] += sum(counts[:start])
        p[-1] += sum(counts[stop:])
        q = [0.0] * len(kept)
        for level in range(levels):
            first, last = level * len(kept) // levels, (level + 1) * len(kept) // levels
            filled = [k for k in range(first, last) if p[k] != 0]
            for k in filled:
                q[k] = sum(kept[first:last]) / len(filled)
        smooth_p, smooth_q = _smooth(p), _smooth(q)
        if smooth_p is None or smooth_q is None:
            continue
        total_p, total_q = sum(smooth_p), sum(smooth_q)
        divergence = sum(
            a / total_p * math.log((a / total_p) / (b / total_q)) for a, b in zip(smooth_p, smooth_q, strict=True)
        )
        if divergence < least - 1e-12:
            best, least = reach, divergence
    return best


def _smooth(values: list[float]) -> list[float] | None:
    zeros = values.count(0.0)
    if zeros == len(values):
        return None
    taken = 1e-4 * zeros / (len(values) - zeros)
    smooth = [1e-4 if value == 0 else value - taken for value in values]
    return smooth if min(smooth) > 0 else None


@pytest.mark.parametrize("levels", [5, 15, 31])
@pytest.mark.parametrize("kind", ["bell", "outliers", "flat", "one-sided", "sparse", "ends"])
def test_thresholds_are_those_of_the_published_algorithm(kind: str, levels: int) -> None:
    """For distributions of many shapes the fast search finds the threshold that the plain one finds."""
    generator = np.random.default_rng(levels)
    at = np.arange(-60, 61)
    counts = {
        "bell": np.round(1e4 * np.exp(-((at / 20) ** 2))),
        "outliers": np.round(1e4 * np.exp(-((at / 8) ** 2))) + (np.abs(at) > 57),
        "flat": np.full(121, 50.0),
        "one-sided": np.where(at < 0, 0.0, np.round(1e3 * np.exp(-at / 15))),
        "sparse": generator.integers(0, 4, 121) * (generator.random(121) < 0.3),
        "ends": np.where(np.abs(at) == 60, 9.0, 0.0),
    }[kind].astype(float)
    assert best_threshold(counts, levels) == _reference(counts.tolist(), levels)


def _range(*tensors: torch.Tensor) -> tuple[float, float]:
    collector = Entropy()
    for tensor in tensors:
        collector.collect("x", "conv", tensor)
    return collector.ranges()["x"]


def test_outliers_are_cut_off_and_even_values_are_not() -> None:
    """A bell with three far values is clipped near its own end; uniform values, and those that saturate already, keep their range."""
    generator = torch.Generator().manual_seed(0)
    bell = torch.randn(1000000, generator=generator)
    low, high = _range(torch.cat([bell, torch.tensor([12.0, -14.0, 10.0])]))
    assert low == -high
    assert 3 < high < 8
    assert _range(bell.mul(4).clamp(0, 6)) == pytest.approx((0, 6), rel=1e-3)  # ReLU6
    assert _range(torch.rand(100000, generator=generator)) == pytest.approx((0, 1), rel=1e-2)


def _rounding_error(values: torch.Tensor, limits: tuple[float, float]) -> float:
    """The root mean square error of quantizing in these limits."""
    steps = (0, 255) if limits[0] >= 0 else (-128, 127)
    scale = limits[1] / steps[1]
    return float((values - (values / scale).round().clamp(*steps) * scale).square().mean().sqrt())


@pytest.mark.parametrize("kind", ["bell", "channel", "long", "rectified"])
def test_no_cut_costs_more_than_it_saves(kind: str) -> None:
    """Quantized in the range found, values are off by no more than in the full one, even where a few channels hold most of the energy."""
    values = torch.randn(1000, 384, generator=torch.Generator().manual_seed(0))
    if kind == "channel":
        values[:, 7] *= 12
    elif kind == "long":
        values = values.exp()
    elif kind == "rectified":
        values = values.relu().square()
    full = float(values.abs().max())
    found = _range(values)
    assert found[1] < full
    assert _rounding_error(values, found) <= 1.01 * _rounding_error(values, (min(found[0], 0.0), full))


@pytest.mark.parametrize("levels", [15, 31])
def test_the_least_threshold_is_where_squared_errors_are_equal(levels: int) -> None:
    """The threshold is the first whose error, summed value by value, is at most that of the full range."""
    generator = np.random.default_rng(levels)
    at = np.arange(-200, 201)
    counts = np.round(1e4 * np.exp(-np.abs(at) / 15)) + (generator.random(401) < 0.05)

    def error(reach: int) -> float:
        step = (2 * reach + 1) / levels
        clipped = sum(
            count * max(abs(place) - reach, 0) ** 2 for place, count in zip(at.tolist(), counts.tolist(), strict=True)
        )
        return float(clipped + counts.sum() * step**2 / 12)

    expected = next(reach for reach in range(201) if error(reach) <= error(200) * (1 + 1e-12))
    assert 0 < expected < 200
    assert least_threshold(counts, levels) == expected
    assert best_threshold(counts, levels, expected) >= expected


def test_the_order_of_batches_hardly_matters() -> None:
    """Larger values that come later widen the histogram, exactly; zeros count for nothing; a tensor of zeros has an empty range."""
    torch.manual_seed(0)
    small, large = torch.randn(50000).clamp(-0.9, 0.9) * 1e-3, torch.randn(50000)
    forwards, backwards = _range(small, large), _range(large, small)
    assert forwards[1] == pytest.approx(backwards[1], rel=0.05)
    assert _range(large, torch.zeros(1000000)) == _range(large)
    assert _range(torch.zeros(5)) == (0.0, 0.0)


def test_all_that_was_seen() -> None:
    """The naive calibration keeps extremes over all calls."""
    collector = MinMax()
    for values in ([1.0, 2.0], [-3.0, 1.0], [0.0, 5.0]):
        collector.collect("a", "linear", torch.tensor(values))
    assert collector.ranges() == {"a": (-3.0, 5.0)}


def test_what_a_calibration_may_be() -> None:
    """A name, or a collector."""
    own = MinMax()
    assert collector_of(own) is own
    assert collector_of("none") is None
    assert isinstance(collector_of("entropy"), Entropy)
    with pytest.raises(QuantizationError, match="must be one of none, naive, entropy, or a Collector; it is 'minmax'"):
        collector_of("minmax")
    with pytest.raises(NotImplementedError):
        Collector().ranges()
