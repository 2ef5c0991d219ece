"""Eager PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import GROUP_SIZE, LacksError, Prepared, Setting, pytorch


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """The model itself; half precision by autocast, quantized weights by ATen's operators."""
    if setting.is_int8:
        # PT2E replaced torch.ao's integer modules, and eager computes its graphs in float32.
        raise LacksError(f"it has no {setting.precision} of its own; its times as written are shown")
    if setting.weight_bits is None or setting.training:
        return pytorch.prepared(model, inputs, setting, lambda module: module)
    packed = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and _fits(layer, setting.weight_bits):
                setattr(parent, name, _Packed(layer, setting.weight_bits))
                packed += 1
    return Prepared(
        lambda: inputs.call(model), lambda: {"executed": {f"linear layers of {setting.weight_bits} bits": packed}}
    )


def _fits(layer: nn.Linear, bits: int) -> bool:
    """True if ATen supports the layer: with 4 bits, whole groups and a multiple of 16 output channels."""
    return bits == 8 or (layer.in_features % GROUP_SIZE == 0 and layer.out_features % 16 == 0)


class _Packed(nn.Module):
    """A linear layer with packed weights. x: (..., k) float32.  Returns: (..., n)."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        super().__init__()
        self.bits, self.bias = bits, layer.bias
        weight = layer.weight.detach()
        self.weight, self.scales = (packed_int8 if bits == 8 else packed_int4)(weight, weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.bits == 8:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP_SIZE, self.scales)
        y = y.reshape(*x.shape[:-1], -1)
        result: torch.Tensor = y if self.bias is None else y + self.bias
        return result


def packed_int8(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (N, K) as int8, and a scale for each row, (N,)."""
    scale = w.abs().amax(1) / 127
    return (w / scale[:, None]).round().to(torch.int8), scale.to(dtype)


def packed_int4(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (N, K) as PyTorch packs 4 bits, and the scales and zeros of its groups, (K / GROUP_SIZE, N, 2): (q - 8) * scale + zero."""
    n, k = w.shape
    groups = w.view(n, k // GROUP_SIZE, GROUP_SIZE)
    scale = groups.abs().amax(2) / 7
    q = (groups / scale[:, :, None]).round() + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.view(n, k).to(torch.int32), 2)
    return packed, torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().to(dtype)
