"""Random weights under which a test means something.

Freshly made models hide mistakes: batch norms with mean 0 and variance 1, zero biases and layer scales of 1e-6 make whole
blocks the identity or vanish, so that a wrong fold or a dropped bias would not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def randomise(model: nn.Module, inputs: tuple[torch.Tensor, ...] | Callable[[], object], seed: int = 0) -> None:
    """Overwrite every parameter and running statistic of `model` in place, reproducibly for one `seed`.

    Matrices and filters keep the variance of what flows through them (standard deviation 1/sqrt(fan in); sqrt(2/fan in), He et al. 2015,
    where nothing but ReLUs lies between them, each of which takes half); norm scales
    are in [0.5, 1.5], biases small and not zero. Running statistics are those of `inputs`, then disturbed by 10% of a
    standard deviation and up to 20% of the variance. The model is left in eval mode.

    inputs: positional ones of the model, or a function that calls it.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = {type(module) for module in model.modules()}
    gain = math.sqrt(2) if nn.ReLU in kinds and not any("Norm" in kind.__name__ for kind in kinds) else 1.0
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                _fill(parameter, _kind(module, name, parameter), gain, generator)
        norms = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
        if norms:
            _measure_statistics(model, norms, inputs if callable(inputs) else lambda: model(*inputs), generator)
    model.eval()


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Keep the weights that the model's author chose, but leave none 0 and none equal, reproducibly for one `seed`.

    For models some of whose parameters mean something by themselves (decay rates, frequencies). Vectors get noise of 0.1 of their magnitude, at
    least 0.01; matrices that are all zero are drawn at random.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() >= 2 and not parameter.any():
                _fill(parameter, ("weight", math.prod(parameter.shape[1:])), 1.0, generator)
            elif parameter.dim() < 2:
                noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator)
                parameter.add_(noise * parameter.abs().clamp(min=0.1))
    model.eval()


def _kind(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, int]:
    """The kind of a parameter ("weight", "scale" or "bias") and, for weights, how many inputs each output sums."""
    if isinstance(module, nn.Embedding) or "embed" in name or "token" in name:
        return "weight", 1
    if parameter.dim() < 2:
        return ("bias" if "bias" in name else "scale"), 0
    if type(module).__name__ == "Conv1D":  # GPT-2's transposed linear layer: (inputs, outputs)
        return "weight", parameter.shape[0]
    if isinstance(module, nn.ConvTranspose2d):  # kernel = stride here: each output sums the input channels once
        return "weight", parameter.shape[0]
    return "weight", math.prod(parameter.shape[1:])


def _fill(parameter: nn.Parameter, kind: tuple[str, int], gain: float, generator: torch.Generator) -> None:
    what, fan_in = kind
    if what == "scale":
        parameter.uniform_(0.5, 1.5, generator=generator)
    elif what == "bias":
        parameter.normal_(0.0, 0.1, generator=generator)
    else:
        # 0.5 for tables: embeddings, positions and types are summed before the first norm.
        deviation = 0.5 if fan_in == 1 else gain * fan_in**-0.5
        parameter.normal_(0.0, deviation, generator=generator)


def _measure_statistics(
    model: nn.Module, norms: list[nn.Module], call: Callable[[], object], generator: torch.Generator
) -> None:
    """Set running statistics to those of one call (training mode for the norms alone: dropout stays off), then disturb them."""
    model.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    call()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
        # A floor: a channel that is constant on these inputs would otherwise be divided by almost nothing.
        norm.running_var.clamp_(min=1e-2)
        shift = torch.empty_like(norm.running_mean).normal_(0.0, 0.1, generator=generator)
        norm.running_mean.add_(shift * norm.running_var.sqrt())
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.8, 1.2, generator=generator))
