"""Calibration: from the activations of a few inputs to the range that each is quantized in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from torch_hybrid_backend.errors import QuantizationError, did_you_mean

Range = tuple[float, float]

_BINS = 8001  # of a histogram around 0: odd, and a multiple of three
_LEVELS = 255
_SMOOTHING = 1e-4


class Collector:
    """A calibration: derive from it, and give `quantize` an instance.

    `collect` is called for every activation that a layer is given, in every call of the model; `ranges` once, at the end.
    """

    def collect(self, name: str, operator: str, tensor: torch.Tensor) -> None:
        """`name`: of the layer, as in `Module.named_modules()`, with "#2" behind it for its second call in one forward and so on, and " other"
        for the second operand of a product of activations and for the keys of an attention, whose values have " values". `operator`: one of
        the kinds that `quantize` may exclude. `tensor`: the activation, of floating
        point, finite; not to be changed."""
        raise NotImplementedError

    def ranges(self) -> Mapping[str, Range]:
        """For each name the lowest and the highest value that it is quantized to; one that is not there stays in floating point."""
        raise NotImplementedError


class MinMax(Collector):
    """All that was seen: `calibration="naive"`."""

    def __init__(self) -> None:
        self._seen: dict[str, Range] = {}

    def collect(self, name: str, operator: str, tensor: torch.Tensor) -> None:
        low, high = map(float, torch.aminmax(tensor))
        before = self._seen.get(name, (low, high))
        self._seen[name] = min(low, before[0]), max(high, before[1])

    def ranges(self) -> Mapping[str, Range]:
        return dict(self._seen)


class Entropy(Collector):
    """The range that loses least information, and is not off by more than the full one: `calibration="entropy"`.

    Of every threshold, the distribution of what is seen, clipped there, is compared with its quantized form by the Kullback-Leibler divergence.
    Source: Migacz, "8-bit Inference with TensorRT", 2017; with the bins, levels and smoothing of Apache MXNet's calibrate.cc.

    The divergence counts how many values are clipped, not by how much. A few channels that hold most of the energy, as transformers have them,
    it cuts off. So only those thresholds count whose expected squared error is at most that of `calibration="naive"`.
    """

    def __init__(self) -> None:
        self._seen = MinMax()
        self._histograms: dict[str, _Histogram] = {}

    def collect(self, name: str, operator: str, tensor: torch.Tensor) -> None:
        self._seen.collect(name, operator, tensor)
        self._histograms.setdefault(name, _Histogram()).add(tensor)

    def ranges(self) -> Mapping[str, Range]:
        found = {}
        for name, (low, high) in self._seen.ranges().items():
            limit = max(high, -low)
            found[name] = (low, high) if limit == 0 else self._histograms[name].range(limit, non_negative=low >= 0)
        return found


class _Histogram:
    """Counts of `_BINS` bins of equal width around 0, whose range is tripled when larger values come: three bins become one, exactly.

    Zeros are not counted: any range holds them exactly, and after a ReLU they would outweigh all else.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS)
        self.limit = 0.0  # the range is -limit .. limit

    def add(self, tensor: torch.Tensor) -> None:
        values = tensor.detach().flatten().to("cpu", torch.float32)
        values = values[values != 0]
        if not len(values):
            return
        largest = float(values.abs().max())
        self.limit = self.limit or largest
        while largest > self.limit:
            self.limit *= 3
            merged = self.counts.reshape(-1, 3).sum(1)
            around = (_BINS - len(merged)) // 2
            self.counts = np.pad(merged, around)
        self.counts += torch.histc(values, _BINS, -self.limit, self.limit).double().numpy()

    def range(self, largest: float, *, non_negative: bool) -> Range:
        """The best range within -largest .. largest, from 0 where nothing is negative."""
        width = 2 * self.limit / _BINS
        used = min(round(largest / width), _BINS // 2)  # bins on either side of the middle one that hold something
        middle = _BINS // 2
        counts = self.counts[middle - used : middle + used + 1]
        levels = 2 * _LEVELS + 1 if non_negative else _LEVELS
        reach = best_threshold(counts, levels, least_threshold(counts, levels))
        threshold = min((reach + 0.5) * width, largest)
        return (0.0 if non_negative else -threshold), threshold


def least_threshold(counts: np.ndarray, levels: int) -> int:
    """The fewest bins to keep on either side of the middle one whose expected squared error is no larger than that of all of them.

    What is clipped is off by its distance from the threshold; rounding adds a twelfth of a squared step. Arguments as of `best_threshold`.
    """
    middle = len(counts) // 2
    magnitudes = counts[middle:].copy()
    magnitudes[1:] += counts[:middle][::-1]
    reach = np.arange(middle + 1)
    # Of the bins beyond each reach: how many values they hold, and sums of these values' magnitudes and squares.
    beyond, first, second = (
        np.cumsum((magnitudes * reach**power)[::-1])[::-1] - magnitudes * reach**power for power in (0, 1, 2)
    )
    clipped = second - 2 * reach * first + reach**2 * beyond
    rounded = magnitudes.sum() * ((2 * reach + 1) / levels) ** 2 / 12
    return int(np.argmax(clipped + rounded <= rounded[-1]))


def best_threshold(counts: np.ndarray, levels: int, least: int = 0) -> int:
    """Number of bins to keep on either side of the middle one of a histogram, so that its distribution with the rest moved to the ends differs
    least, by Kullback and Leibler, from what `levels` equal steps make of it. At least `least`, where that is given.

    `counts` has an odd number of bins, `levels` is odd.
    """
    middle = len(counts) // 2
    total = np.concatenate(([0.0], np.cumsum(counts)))
    occupied = np.concatenate(([0], np.cumsum(counts != 0)))
    best, lowest = middle, np.inf
    for reach in range(max(levels // 2, least), middle + 1):
        start, stop = middle - reach, middle + reach + 1
        divergence = _divergence(
            counts[start:stop], total[start : stop + 1], occupied[start : stop + 1], total[-1], levels
        )
        if divergence < lowest:
            best, lowest = reach, divergence
    return best


def _divergence(kept: np.ndarray, total: np.ndarray, occupied: np.ndarray, everything: float, levels: int) -> float:
    """Divergence of the kept bins with the outliers at their ends (p) from the kept bins spread evenly over each level (q).

    `total` and `occupied` are running sums of counts, and of bins that are not empty."""
    p = kept.copy()
    p[0] += total[0]
    p[-1] += everything - total[-1]
    present = p != 0
    edges = np.arange(levels + 1) * len(kept) // levels
    mass, bins = np.diff(total[edges]), np.diff(occupied[edges])
    # A bin that only outliers have filled counts as one of its level.
    bins[0] += int(present[0]) - int(kept[0] != 0)
    bins[-1] += int(present[-1]) - int(kept[-1] != 0)
    level = np.divide(mass, bins, out=np.zeros(levels), where=bins > 0)
    q = np.where(present, np.repeat(level, np.diff(edges)), 0.0)
    return _kullback_leibler(_smoothed(p), _smoothed(q))


def _smoothed(counts: np.ndarray) -> np.ndarray | None:
    """No zeros: each gets `_SMOOTHING`, taken from the others; None where they have too little."""
    zero = counts == 0
    zeros = int(zero.sum())
    if zeros == len(counts):
        return None
    taken = _SMOOTHING * zeros / (len(counts) - zeros)
    smooth = np.where(zero, _SMOOTHING, counts - taken)
    return smooth if float(smooth.min()) > 0 else None


def _kullback_leibler(p: np.ndarray | None, q: np.ndarray | None) -> float:
    if p is None or q is None:
        return np.inf
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


CALIBRATIONS = {"naive": MinMax, "entropy": Entropy}
LEGAL = ("none", *CALIBRATIONS)


def collector_of(calibration: str | Collector) -> Collector | None:
    """The collector that a calibration stands for; None for "none". Raises QuantizationError for what is no calibration."""
    if isinstance(calibration, Collector):
        return calibration
    if calibration == "none":
        return None
    if not isinstance(calibration, str) or calibration not in CALIBRATIONS:
        hint = did_you_mean(calibration, LEGAL) if isinstance(calibration, str) else ""
        said = f"calibration must be one of {', '.join(LEGAL)}, or a Collector; it is {calibration!r}. {hint}"
        raise QuantizationError(said.rstrip(" ."))
    return CALIBRATIONS[calibration]()
