"""Optimality of one-dimensional k-means."""

from __future__ import annotations

import numpy as np
import pytest

from torch_hybrid_backend.compression.clusters import Floats, k_means, nearest


def _error(values: Floats, centres: Floats) -> float:
    return float(np.square(values - centres[nearest(values, centres)]).sum())


def _least_error(values: Floats, clusters: int) -> float:
    """The least error of all partitions of the sorted values into `clusters` intervals, by plain dynamic programming."""
    ordered = np.sort(values) - values.mean()
    first, second = (np.concatenate(([0.0], np.cumsum(x))) for x in (ordered, ordered * ordered))
    best = np.concatenate(([0.0], np.full(len(values), np.inf)))
    for _ in range(clusters):
        errors = [
            min(best[i] + second[j] - second[i] - (first[j] - first[i]) ** 2 / (j - i) for i in range(j))
            for j in range(1, len(values) + 1)
        ]
        best = np.array([np.inf, *errors])
    return float(best[-1])


def test_no_partition_is_better() -> None:
    """No partition of few values has a smaller error: normal values, long tails, values far from zero, equal values."""
    rng = np.random.default_rng(0)
    for number in range(40):
        values = rng.standard_t(2, size=int(rng.integers(5, 60))) * rng.choice([1, 100]) + rng.choice([0, 1e4])
        if number % 3 == 0:
            values = np.round(values)
        clusters = int(rng.integers(2, 9))
        centres = k_means(values, clusters)
        assert len(centres) <= clusters
        assert (np.diff(centres) > 0).all()
        least = _least_error(values, min(clusters, len(np.unique(values))))
        assert _error(values, centres) <= least * (1 + 1e-6) + 1e-6


def test_many_values_reach_the_known_optimum_of_the_normal_distribution() -> None:
    """16 levels have a mean squared error of 0.009497 of the variance (Max, Quantizing for minimum distortion, 1960)."""
    values = np.random.default_rng(1).normal(size=300_000)
    assert _error(values, k_means(values, 16)) / np.square(values).sum() == pytest.approx(0.009497, rel=0.02)


def test_one_value_far_away_costs_one_cluster() -> None:
    """The other values keep the error that they have with one cluster less: no centre lies in the gap."""
    values = np.random.default_rng(2).normal(size=50_000)
    without = _error(values, k_means(values, 15))
    values[0] = 1e6
    assert _error(values, k_means(values, 16)) <= without * 1.001


def test_few_distinct_values_are_their_own_centres() -> None:
    """Nothing is lost if there are at most as many distinct values as clusters."""
    values = np.array([3.0, -1.0, 3.0, 0.5, 0.5])
    assert k_means(values, 16).tolist() == [-1.0, 0.5, 3.0]
    assert nearest(values, k_means(values, 16)).tolist() == [2, 0, 2, 1, 1]


def test_no_cluster_is_lost_to_a_hole() -> None:
    """With a gap around zero, as pruning leaves it, 15 clusters are 7 on one side and 8 on the other."""
    values = np.random.default_rng(3).normal(size=40_000)
    centres = k_means(values[np.abs(values) > 0.7], 15)
    assert sorted((int((centres < 0).sum()), int((centres > 0).sum()))) == [7, 8]
