"""PyTorch as it is, without gradients."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers import GROUP, Prepared, Setting, pytorch


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """The model itself; half precision by autocast, packed weights by ATen's own operators."""
    if setting.is_int8:
        raise NotImplementedError(
            "eager computes quantised graphs in float32: torch.ao's integer modules gave way to PT2E"
        )
    if setting.weight_bits is None:
        return pytorch.prepared(model, inputs, setting, lambda module: module)
    packed = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and _fits(layer, setting.weight_bits):
                setattr(parent, name, _Packed(layer, setting.weight_bits))
                packed += 1
    return Prepared(
        lambda: model(*inputs), lambda: {"executed": {f"linear layers of {setting.weight_bits} bits": packed}}
    )


def _fits(layer: nn.Linear, bits: int) -> bool:
    """Whether ATen takes such a layer: whole groups, and channels in sixteens."""
    return bits == 8 or (layer.in_features % GROUP == 0 and layer.out_features % 16 == 0)


class _Packed(nn.Module):
    """A linear layer with packed weights. x: (..., k) float32.  Returns: (..., n)."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        from benchmarks.quantized_weights import in_bytes, in_nibbles  # with it comes all of hybrid

        super().__init__()
        self.bits, self.bias = bits, layer.bias
        weight = layer.weight.detach()
        self.weight, self.scales = (in_bytes if bits == 8 else in_nibbles)(weight, weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.bits == 8:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
