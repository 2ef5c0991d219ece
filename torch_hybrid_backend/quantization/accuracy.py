"""Errors of a quantized module: its outputs, and its layers one by one; and layers that return to floating point for it."""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_hybrid_backend.core.precision import DEFAULT_TOLERANCES
from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.call_sites import LayerCall
from torch_hybrid_backend.quantization.loader import Loader
from torch_hybrid_backend.torch_private import tree_leaves

if TYPE_CHECKING:
    from torch_hybrid_backend.quantization.quantize import QuantizedModule

_log = logging.getLogger(__name__)
Metric = Callable[[nn.Module], float]
# Of the loader, to compare outputs: a look, that takes no longer than a part of calibration.
_ITEMS = 8
_NAMED = 3


def warn_if_far(result: QuantizedModule, model: nn.Module, data: Loader) -> None:
    """Warn once if an output is further from the model's than int8 usually is, with the layers that are off the most."""
    tolerance, error = DEFAULT_TOLERANCES["int8"], output_error(result, model, data)
    if error <= tolerance:
        return
    errors = layer_errors(result, data, _ITEMS)
    worst = sorted(errors, key=errors.__getitem__, reverse=True)[:_NAMED]
    _log.warning(
        "quantize: outputs of the %s are off by %.2g of their root mean square (the loader's first %d items); up to %g is usual. The layers "
        "that are off the most: %s. Exclude layers (exclude=), move differences between channels into weights (smooth=0.5), or pass a "
        "metric (metric=), by which layers return to floating point",
        type(model).__name__,
        error,
        _ITEMS,
        tolerance,
        ", ".join(f"{name} ({errors[name]:.2g})" for name in worst),
    )


def output_error(result: QuantizedModule, model: nn.Module, data: Loader) -> float:
    """The root mean square of what quantizing changes, over that of the output: of the output for which that is largest, over the loader's
    first items. Numbers that are not finite in the model's output do not count; outputs that are no tensors of floats neither. What is NaN
    in the result's alone is infinitely far off. Both draw the same random numbers."""
    squares: dict[int, list[float]] = {}

    def compare(call: Callable[[nn.Module], Any]) -> None:
        pairs = zip(*(tree_leaves(_alike(call, module)) for module in (model, result)), strict=True)
        for number, (expected, found) in enumerate(pairs):
            if isinstance(expected, torch.Tensor) and expected.is_floating_point():
                counts = expected.isfinite()
                sums = squares.setdefault(number, [0.0, 0.0])
                sums[0] += float((found - expected)[counts].double().square().sum())
                sums[1] += float(expected[counts].double().square().sum())

    def both(*args: Any, **kwargs: Any) -> None:
        compare(lambda module: module(*args, **kwargs))

    data.run(both, _ITEMS)
    errors = [math.sqrt(error / size) for error, size in squares.values() if size]
    # `max` may pass over NaN.
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


def _alike(call: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    """A call with the random numbers of every other such call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return call(module)


def return_to_float(result: QuantizedModule, data: Loader, metric: Metric, goal: float) -> None:
    """Takes layers out of the result's ranges, those with the largest errors, as few as it takes for the metric to be at least `goal`."""
    if score(metric, result) >= goal:
        return
    before, errors = result.ranges, layer_errors(result, data)
    worst = sorted(before.sites, key=lambda site: errors.get(site, 0.0), reverse=True)

    def leave(count: int) -> None:
        gone = dict.fromkeys(worst[:count], "accuracy")
        kept = {site: how for site, how in before.sites.items() if site not in gone}
        result.ranges = replace(before, sites=kept, in_float={**before.in_float, **gone})

    def suffices(count: int) -> bool:
        leave(count)
        return score(metric, result) >= goal

    # The metric grows with each layer that returns, but for chance: so few runs find how many must. Mostly it is one or two.
    too_few, enough = 0, 1
    while enough < len(worst) and not suffices(enough):
        too_few, enough = enough, min(2 * enough, len(worst))
    between = range(too_few + 1, enough)
    leave(too_few + 1 + bisect.bisect_left(between, True, key=suffices))


def score(metric: Metric, module: nn.Module) -> float:
    """A metric's score of a module. Raises QuantizationError if it is NaN."""
    score = float(metric(module))
    if math.isnan(score):
        raise QuantizationError(
            f"the metric of the {type(module).__name__} is NaN: it must be a number, higher is better"
        )
    return score


def layer_errors(result: QuantizedModule, data: Loader, most: int | None = None) -> dict[str, float]:
    """Change of each site's result by quantizing its operands, as a share of the result's root mean square; over all items, or the first
    `most`."""
    squares: dict[str, list[float]] = {}

    def compare(call: LayerCall) -> Any:
        expected = call.compute(*call.operands)
        if call.known is not None and call.known[0] == call.kind:
            sums = squares.setdefault(call.site, [0.0, 0.0])
            sums[0] += float((result.quantized(call) - expected).double().square().sum())
            sums[1] += float(expected.double().square().sum())
        return expected

    data.run(result.run_with(compare), most)
    return {name: math.sqrt(error / size) if size else 0.0 for name, (error, size) in squares.items()}
