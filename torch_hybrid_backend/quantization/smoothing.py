"""SmoothQuant: differences between the channels of linear layers' inputs move into their weights.

    x @ w  =  (x / factors) @ (factors * w)        factors = max|x|^strength / max|w|^(1 - strength), by input channel

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", ICML 2023. As there, layers
that read the same tensor (queries, keys and values) have factors in common: their input is scaled and quantized once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.ranges import Site
from torch_hybrid_backend.quantization.residuals import found, keep

_LEAST_FACTOR = 1e-5


def strengths_of(smooth: float | Sequence[float] | None) -> tuple[float, ...]:
    """By how much to smooth: what to choose from. Raises QuantizationError for anything but numbers from 0 to 1."""
    if smooth is None:
        return ()
    strengths = tuple(smooth) if isinstance(smooth, Iterable) else (smooth,)
    if not strengths or not all(isinstance(number, Real) and 0 <= number <= 1 for number in strengths):
        raise QuantizationError(f"smooth must be a number from 0 to 1, several of them, or None; it is {smooth!r}")
    return strengths


def scaled(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A linear layer's input without the differences between its channels."""
    return x * (1 / factors).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Largest:
    """By input channel: the largest magnitude of a layer's input, and of its weight."""

    of_x: torch.Tensor
    of_w: torch.Tensor

    def __or__(self, other: _Largest) -> _Largest:
        return _Largest(torch.maximum(self.of_x, other.of_x), torch.maximum(self.of_w, other.of_w))


class Channels:
    """Inputs of linear layers while a model runs: how large each channel is, and which layers read the same."""

    def __init__(self) -> None:
        self._largest: dict[str, _Largest] = {}
        self._readers = WeakTensorKeyDictionary()  # the first layer that read a tensor
        self._first: dict[str, str] = {}  # by layer, the first of those that always read what it reads

    def linear(self, name: str, axis: int, x: torch.Tensor, w: torch.Tensor) -> None:
        """A layer reads `x`; dimension `axis` of its weight counts output channels."""
        own = _Largest(x.abs().reshape(-1, x.shape[-1]).amax(0).float(), w.abs().amax(axis).float())
        self._largest[name] = self._largest[name] | own if name in self._largest else own
        first = found(self._readers, x)
        if first is None:
            first = name
            keep(self._readers, x, name)
        if self._first.setdefault(name, first) != first:
            self._first[name] = name

    @property
    def groups(self) -> list[list[str]]:
        """The layers, those together that read the same."""
        together: dict[str, list[str]] = {}
        for name, first in self._first.items():
            together.setdefault(first, []).append(name)
        return list(together.values())

    def smoothed(self, sites: Mapping[str, Site], strength: float) -> dict[str, Site]:
        """The layers' sites with the factors of that strength."""
        result: dict[str, Site] = {}
        for group in self.groups:
            largest = self._largest[group[0]]
            for name in group[1:]:
                largest |= self._largest[name]
            factors = _factors(largest, strength)
            result.update((name, replace(sites[name], smoothing=factors)) for name in group)
        return result


def _factors(largest: _Largest, strength: float) -> tuple[float, ...]:
    """max|x|^strength / max|w|^(1 - strength) for each input channel; 1 where one of them is never used."""
    factors = largest.of_x.pow(strength) / largest.of_w.pow(1 - strength)
    used = (largest.of_x > 0) & (largest.of_w > 0) & factors.isfinite()
    return tuple(torch.where(used, factors.clamp(_LEAST_FACTOR, 1 / _LEAST_FACTOR), 1.0).tolist())


def with_least_error(
    groups: Iterable[Sequence[str]], ways: Sequence[Mapping[str, Site]], errors: Sequence[Mapping[str, float]]
) -> dict[str, Site]:
    """The first way, and for each group of layers the way by which their results are least off together; the first of equals.

    ways: sites by layer; a way that lacks a layer of a group is none for it. errors: by layer, for each way, as shares of a result's root mean
    square.
    """
    best = dict(ways[0])
    for group in groups:
        names = [name for name in group if name in ways[0]]
        totals = [
            sum(off.get(name, 0.0) ** 2 for name in names) if all(name in sites for name in names) else math.inf
            for sites, off in zip(ways, errors, strict=True)
        ]
        chosen = ways[totals.index(min(totals))]
        best.update((name, chosen[name]) for name in names)
    return best
