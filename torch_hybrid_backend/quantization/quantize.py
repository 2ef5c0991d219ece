"""`quantize`: a model whose convolutions and linear layers multiply integers of 8 bits."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.arguments import check_metric, check_module
from torch_hybrid_backend.config import shows_progress
from torch_hybrid_backend.errors import QuantizationError, did_you_mean, nearest
from torch_hybrid_backend.graph.quantization import call as of_tensors
from torch_hybrid_backend.graph.quantization import rows_now, tensor, tensor_now, weight
from torch_hybrid_backend.machine import default_weight_bits
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.quantization.accuracy import Metric, layer_errors, return_to_float, score, warn_if_far
from torch_hybrid_backend.quantization.calibration import Collector, collector_of
from torch_hybrid_backend.quantization.call_sites import (
    BESIDE,
    KINDS,
    CallSites,
    Known,
    LayerCall,
    Visit,
    follow,
    layers_of,
)
from torch_hybrid_backend.quantization.loader import Loader, check_loader
from torch_hybrid_backend.quantization.ranges import WEIGHT_BITS, Ranges, Site, fingerprint
from torch_hybrid_backend.quantization.resampling import Resampled
from torch_hybrid_backend.quantization.residuals import OTHER, VALUES, Residuals
from torch_hybrid_backend.quantization.smoothing import Channels, scaled, strengths_of, with_least_error

Compute = Callable[..., Any]
Operands = tuple[torch.Tensor, ...]
# Kinds whose scales are not found anew in every call.
_WHERE_CALIBRATED = ("attention", *BESIDE)


def quantize(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    calibration: str | Collector = "entropy",
    exclude: Sequence[str] = (),
    exclude_kinds: Sequence[str] = ("matmul",),
    smooth: float | Sequence[float] | None = None,
    metric: Metric | None = None,
    max_drop: float = 0.002,
    ranges: str | Path | None = None,
    weight_bits: int | None = None,
) -> QuantizedModule:
    """Returns a module with the model's signature, for inference, whose layers quantize their inputs and weights to 8 bits.

    In eager it quantizes and dequantizes, so that its accuracy can be judged without a compiler; `torch.compile(..., backend="hybrid")` makes
    integer products of it. Its parameters and buffers are the model's own: an optimizer's step or `load_state_dict` on the model is seen.
    Weights are quantized per output channel, symmetrically; activations per tensor, to uint8 where calibration saw nothing negative.

    model: in eval mode; float32, bfloat16 or float16. It is left as it is.
    loader: calibration data, some hundred inputs. Its items are a tensor, a tuple of arguments, a dict of keyword arguments, or an
        (input, label) pair of these. Not needed for `calibration="none"`, nor with `ranges`.
    calibration: "entropy" (the range that loses least information, of those whose squared error is at most that of all that was seen),
        "naive" (all that was seen), "none" (scales are found in every call: per tensor for convolutions, per row for linear layers; always to
        int8; of modules alone, unless a loader shows other calls), or a `Collector`.
    exclude: names of modules (as in `named_modules()`, patterns as in `fnmatch`) that stay in floating point, with all that is in them.
    exclude_kinds: kinds of layers that do: "conv", "linear", "matmul" (products of two activations), "attention" (queries, keys and values of
        `scaled_dot_product_attention`, and its softmax in float32), "add" (sums of a convolution's result and what comes from before it),
        "pool" (average poolings of what a convolution reads too); the last three are quantized where calibration finds ranges.
    smooth: between 0 and 1: by how much the differences between the channels of linear layers' inputs move into their weights; 0.5 is usual
        for transformers. The product stays the same but for rounding (Xiao et al., "SmoothQuant", ICML 2023). A layer whose result is
        further off so, on the loader's data, keeps its channels as they are. Of several numbers each layer takes the best; layers that
        read the same tensor (queries, keys and values) take the same.
    metric: how good a module is, higher is better. Layers return to floating point, the one with the largest error first, until
        `metric(model) - metric(result)` is at most `max_drop`. It needs the loader, by which errors are measured. Without a metric a warning
        tells where outputs for the loader's first items are off by more than 0.1 of their root mean square, and which layers are most.
    ranges: a file that `QuantizedModule.save_ranges` wrote for the same model, in place of calibration.
    weight_bits: 8, or 7, which x86 processors without VNNI multiply faster. By default that of `ranges`, else what suits this machine: 7 for a
        model on such a processor, otherwise 8. The result computes with these weights wherever it goes; `save_ranges` keeps the number.
        Depthwise weights always have 8 bits.

    Raises QuantizationError, a ValueError, for: a model in training mode, an empty loader, items that forward does not take, activations that
    are not finite (the layer is named), an exclusion that matches no module, unknown kinds or calibrations, a file of ranges that is damaged or
    another model's. Raises ArgumentError, too a ValueError, for what is no model, no loader or no metric.
    """
    check_module(model, "quantize")
    check_loader(loader)
    check_metric(metric, "quantize")
    if model.training:
        raise QuantizationError(
            "the model is in training mode, a quantized one is for inference: call model.eval() first"
        )
    excluded = _excluded(model, exclude)
    if unknown := set(exclude_kinds) - set(KINDS):
        hint = "".join(did_you_mean(kind, KINDS) for kind in sorted(unknown))
        said = f"exclude_kinds must be among {', '.join(KINDS)}; {', '.join(sorted(unknown))} is not. {hint}"
        raise QuantizationError(said.rstrip(" ."))
    if weight_bits not in (None, *WEIGHT_BITS):
        raise QuantizationError(f"weight_bits must be 7, 8 or None; it is {weight_bits!r}")
    if not max_drop >= 0:
        raise QuantizationError(f"max_drop must be 0 or more; it is {max_drop!r}")
    strengths = strengths_of(smooth)
    collector = collector_of(calibration)
    needed = [
        what
        for what, wanted in (
            (f"calibration={calibration!r}", collector is not None and ranges is None),
            ("smooth", bool(strengths) and ranges is None),
            ("metric", metric is not None),
        )
        if wanted
    ]
    if loader is None and needed:
        raise QuantizationError(f"{' and '.join(needed)} needs a loader: pass some hundred inputs of the model")

    with Progress("quantizing", shown=shows_progress()):
        return _quantized(
            model, loader, collector, excluded, exclude_kinds, strengths, metric, max_drop, ranges, weight_bits
        )


def _quantized(
    model: nn.Module,
    loader: Iterable[Any] | None,
    collector: Collector | None,
    excluded: Callable[[str], bool],
    exclude_kinds: Sequence[str],
    strengths: Sequence[float],
    metric: Metric | None,
    max_drop: float,
    ranges: str | Path | None,
    weight_bits: int | None,
) -> QuantizedModule:
    result = QuantizedModule(model, Ranges(fingerprint(model), {}, {}, weight_bits or _default_weight_bits(model)))
    goal = score(metric, model) - max_drop if metric is not None else None
    data = Loader(loader, model) if loader is not None else None
    if ranges is not None:
        found = Ranges.load(ranges, model)
        kept = {
            name: site for name, site in found.sites.items() if not excluded(name) and site.kind not in exclude_kinds
        }
        result.ranges = replace(
            found,
            sites=kept,
            in_float={**found.in_float, **_dropped(found.sites, kept, "excluded")},
            weight_bits=weight_bits or found.weight_bits,
        )
    elif data is None:
        result.ranges = _unseen(result, excluded, exclude_kinds)
    else:
        result.ranges = _calibrated(result, data, collector, excluded, exclude_kinds, strengths)
    if metric is not None and goal is not None and data is not None:
        return_to_float(result, data, metric, goal)
    elif data is not None:
        warn_if_far(result, model, data)
    return result


class QuantizedModule(nn.Module):
    """The module that `quantize` returns. `model` is a copy of the original's modules, around the original's own parameters and buffers."""

    def __init__(self, model: nn.Module, ranges: Ranges) -> None:
        super().__init__()
        own = [*model.parameters(), *model.buffers()]
        # The memo makes the copy share them, and whatever refers to them or to modules refer to the copy's.
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
        self._smoothing: dict[str, str] = {}  # a site's name -> its buffer's
        self._changes = 0
        self.ranges = ranges
        super().train(False)

    @property
    def ranges(self) -> Ranges:
        """Quantization of each call of a layer, and the layers that stay in floating point, and why."""
        return self._ranges

    @ranges.setter
    def ranges(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._changes += 1
        for name in set(self._smoothing.values()):
            delattr(self, name)
        self._smoothing = {}
        buffers: dict[tuple[float, ...], str] = {}  # layers with the same factors read one: their input is scaled once
        device = next((parameter.device for parameter in self.model.parameters()), None)
        for position, (name, site) in enumerate(ranges.sites.items()):
            if site.smoothing is None:
                continue
            if site.smoothing not in buffers:
                buffers[site.smoothing] = f"smoothing_{position}"
                factors = torch.tensor(site.smoothing, dtype=torch.float32, device=device)
                self.register_buffer(buffers[site.smoothing], factors, persistent=False)
            self._smoothing[name] = buffers[site.smoothing]
        self._follow()

    def _follow(self) -> None:
        """Has the model's modules tell `CallSites` how their sites are quantized: kind, ranges, the buffer that smooths, bits of weights."""
        known: dict[str, Known] = {}
        for name, site in self._ranges.sites.items():
            pairs = site.ranges and tuple(pair and (float(pair[0]), float(pair[1])) for pair in site.ranges)
            known[name] = site.kind, pairs, self._smoothing.get(name), self._ranges.weight_bits
        follow(self.model, known)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._follow()

    def save_ranges(self, path: str | Path) -> None:
        """Writes what calibration found as JSON, for `quantize(model, ranges=path)`."""
        self._ranges.save(path)

    def train(self, mode: bool = True) -> QuantizedModule:
        """Raises QuantizationError for training mode: rounding has no gradient."""
        if mode:
            raise QuantizationError("a quantized module is for inference: train the original, whose weights it shares")
        super().train(False)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients."""
        # Dynamo guards a number that is looked at, where torch 2.11's does not guard the classes that `follow` makes.
        assert self._changes > 0
        with torch.no_grad(), CallSites(self._visit):
            return self.model(*args, **kwargs)

    def run_with(self, visit: Visit, *, all_beside: bool = False) -> Callable[..., Any]:
        """The module with every call of a layer left to `visit`, as `CallSites` describes it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad(), CallSites(visit, all_beside=all_beside):
                return self.model(*args, **kwargs)

        return run

    def _visit(self, call: LayerCall) -> Any:
        if call.known is None or call.known[0] != call.kind:
            return call.compute(*call.operands)
        return self.quantized(call)

    def quantized(self, call: LayerCall) -> Any:
        """A call of a layer that something is known of, with its operands quantized and dequantized."""
        assert call.known is not None
        kind, ranges, _, weight_bits = call.known
        if kind in _WHERE_CALIBRATED:
            pairs = zip(call.operands, ranges or (), strict=True)
            return call.compute(*(x if pair is None else tensor(of_tensors, x, *pair) for x, pair in pairs))
        x, w = self.smoothed(call)
        now = tensor_now if kind == "conv" else rows_now
        narrow_x = now(of_tensors, x) if ranges is None else tensor(of_tensors, x, *ranges[0])
        if call.axis is not None:
            narrow_w = weight(of_tensors, w, call.axis, weight_bits)
        else:
            narrow_w = tensor_now(of_tensors, w) if ranges is None else tensor(of_tensors, w, *ranges[1])
        return call.compute(narrow_x, narrow_w)

    def smoothed(self, call: LayerCall) -> Operands:
        """A call's operands with the differences between input channels moved into the weight."""
        if call.known is None or call.known[2] is None:
            return call.operands
        x, w = call.operands
        factors = getattr(self, call.known[2])
        along = factors if call.axis == 0 else factors.unsqueeze(1)
        return scaled(x, factors), w * along.to(w.dtype)


def _excluded(model: nn.Module, patterns: Sequence[str]) -> Callable[[str], bool]:
    """A test of names, of modules or of sites: excluded by the patterns, itself or by what it lies in. Raises QuantizationError for a
    pattern that matches no module."""
    if isinstance(patterns, str):
        raise QuantizationError(f"exclude must be a sequence of names: ({patterns!r},)")
    names = list(dict.fromkeys(name for name in (*dict(model.named_modules()), *layers_of(model)) if name))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            advice = _near(pattern, names) or f"Names are like {', '.join(names[:3])}"
            raise QuantizationError(
                f"exclude={pattern!r} matches no module of the {type(model).__name__}. {advice}".rstrip()
            )

    def excluded(name: str) -> bool:
        parts = name.split("#", maxsplit=1)[0].split(".")
        return any(
            fnmatch.fnmatchcase(".".join(parts[:count]), pattern)
            for count in range(1, len(parts) + 1)
            for pattern in patterns
        )

    return excluded


def _near(pattern: str, names: Sequence[str]) -> str:
    """Answer of `did_you_mean` for whole names, or else of their last parts: layers are often called by these alone."""
    if hint := did_you_mean(pattern, names):
        return hint
    by_last = {name.rpartition(".")[2]: name for name in names}
    last = nearest(pattern, by_last)
    return f"Did you mean {by_last[last]!r}?" if last else ""


def _default_weight_bits(model: nn.Module) -> int:
    """Bits of weights that suit the device of the model's first parameter."""
    parameter = next(model.parameters(), None)
    return default_weight_bits() if parameter is None or parameter.device.type == "cpu" else 8


def _dropped(before: Mapping[str, Site], after: Mapping[str, Site], why: str) -> dict[str, str]:
    return {name: why for name in before if name not in after}


def _unseen(result: QuantizedModule, excluded: Callable[[str], bool], kinds: Sequence[str]) -> Ranges:
    """Without calibration data: every layer that is a module, with scales found in every call."""
    sites: dict[str, Site] = {}
    in_float: dict[str, str] = {}
    for name, layer in layers_of(result.model).items():
        is_attention = isinstance(layer, nn.MultiheadAttention)
        kind = "linear" if is_attention or isinstance(layer, nn.Linear) else "conv"
        if excluded(name) or kind in kinds:
            in_float[name] = "excluded"
        else:
            calls = (name, f"{name}#2", f"{name}#3") if is_attention else (name,)
            sites.update((call, Site(kind)) for call in calls)
    return replace(result.ranges, sites=sites, in_float=in_float)


def _calibrated(
    result: QuantizedModule,
    data: Loader,
    collector: Collector | None,
    excluded: Callable[[str], bool],
    kinds: Sequence[str],
    strengths: Sequence[float],
) -> Ranges:
    """Findings of running the model on the data: which calls there are, how inputs of linear layers are smoothed, and ranges."""
    seen: dict[str, Site] = {}
    in_float: dict[str, str] = {}
    sources: dict[str, tuple[str | None, ...]] = {}  # by operand of a site: the name of what its range is found for
    beside: dict[str, str] = {}  # the kinds of these sites
    channels, residuals, resampled = Channels(), Residuals(), Resampled()

    def look(call: LayerCall) -> Any:
        name, kind, operands = call.site, call.kind, call.operands
        x, *_ = operands
        if kind in BESIDE:
            own = residuals.sources(name, *operands)
            # What is quantized in one call and not in another, or otherwise, stays as it is.
            sources[name] = own if sources.get(name, own) == own else (None,) * len(own)
            beside[name] = kind
            return call.compute(*operands)
        w = operands[1]
        if excluded(name) or kind in kinds:
            in_float[name] = "excluded"
            return call.compute(*operands)
        if kind == "attention" and collector is None:
            in_float[name] = "uncalibrated"
            return call.compute(*operands)
        made = call.compute(*operands)
        if kind == "conv" and resampled.is_faster_in_float(x, w, made):
            in_float[name] = "slower"
            return made
        _check_finite(name, kind, *operands)
        seen[name] = Site(kind)
        sources[name] = _named(name, operands if call.axis is None else operands[:1])
        if strengths and kind == "linear" and call.axis is not None:
            channels.linear(name, call.axis, x, w)
        if kind == "conv":
            residuals.convolution(name, x, made)
        return made

    with residuals, resampled:
        data.run(result.run_with(look, all_beside=collector is not None))
    in_float = {name: why for name, why in in_float.items() if name not in seen}  # a site may have several calls
    linear = [name for group in channels.groups for name in group]
    smoothed = [channels.smoothed(seen, strength) for strength in strengths]
    # The ways of quantizing linear layers: as the first says, or one of the others.
    others = [*smoothed[1:], {name: seen[name] for name in linear}] if linear else []
    seen |= smoothed[0] if smoothed else {}
    for name in [name for name, own in sources.items() if name not in seen and any(own)]:
        if excluded(name) or beside[name] in kinds:
            in_float[name] = "excluded"
        else:
            seen[name] = Site(beside[name])
    result.ranges = replace(result.ranges, sites=seen, in_float=in_float)
    if collector is not None:
        seen, others = _with_ranges(result, data, collector, sources, others)
    if others:
        seen = _with_least_error(result, data, channels.groups, [seen, *others])
    missing = {
        name: "excluded" if excluded(name) else "uncalibrated"
        for name in layers_of(result.model)
        if name not in result.ranges.sites and name not in in_float
    }
    dropped = _dropped(result.ranges.sites, seen, "uncalibrated")
    return replace(result.ranges, sites=seen, in_float={**in_float, **missing, **dropped})


def _named(site: str, operands: Operands) -> tuple[str, ...]:
    """Calibration keys of the operands that are activations."""
    return tuple(site + behind for behind, _ in zip(("", OTHER, VALUES), operands, strict=False))


def _with_ranges(
    result: QuantizedModule,
    data: Loader,
    collector: Collector,
    sources: Mapping[str, tuple[str | None, ...]],
    others: Sequence[Mapping[str, Site]],
) -> tuple[dict[str, Site], list[dict[str, Site]]]:
    """The sites that the collector knows ranges of, and the `others` with theirs. `sources`: by operand, the name of what its range is found
    for."""

    def of_other(name: str, number: int) -> str:
        return f"{name} otherwise {number}"

    def collect(call: LayerCall) -> Any:
        name, kind = call.site, call.kind
        if call.known is not None:
            for own, moved in zip(_named(name, call.operands), result.smoothed(call), strict=True):
                if own in sources[name]:
                    collector.collect(own, kind, moved)
            x, *_ = call.operands
            for number, sites in enumerate(others):
                if name in sites:
                    smoothing = sites[name].smoothing
                    moved = x if smoothing is None else scaled(x, torch.tensor(smoothing, device=x.device))
                    collector.collect(of_other(name, number), kind, moved)
        return call.compute(*call.operands)

    data.run(result.run_with(collect))
    found = collector.ranges()
    for name, (low, high) in found.items():
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise QuantizationError(
                f"{type(collector).__name__}.ranges() gave {name!r} the range ({low}, {high}): it must be two finite numbers, the lower first"
            )
    calibrated = {}
    for name, site in result.ranges.sites.items():
        if all(source is None or source in found for source in sources[name]):
            pairs = tuple(None if source is None else found[source] for source in sources[name])
            calibrated[name] = replace(site, ranges=pairs)
    ranged = [
        {
            name: replace(site, ranges=(found[of_other(name, number)],))
            for name, site in sites.items()
            if name in calibrated and of_other(name, number) in found
        }
        for number, sites in enumerate(others)
    ]
    return calibrated, ranged


def _with_least_error(
    result: QuantizedModule, data: Loader, groups: Sequence[Sequence[str]], ways: Sequence[Mapping[str, Site]]
) -> dict[str, Site]:
    """The first of the ways, with linear layers in that by which their results are least off."""
    before, errors = result.ranges, []
    for sites in ways:
        result.ranges = replace(before, sites=dict(sites))
        errors.append(layer_errors(result, data))
    result.ranges = before
    return with_least_error(groups, ways, errors)


def _check_finite(name: str, kind: str, *operands: torch.Tensor) -> None:
    if not all(bool(operand.isfinite().all()) for operand in operands):
        raise QuantizationError(
            f"the {kind} layer {name!r} is given NaN or infinity while calibrating: mend the model or the loader, or exclude the layer"
        )
