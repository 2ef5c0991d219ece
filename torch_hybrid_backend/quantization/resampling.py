"""Convolutions of one pixel that are faster in floating point, since they read what is resampled.

A convolution of one pixel and a resampling change places where nothing is rounded between them (`passes/cpu/resample_last.py`): the convolution
then works on the small image, a quarter of the multiply-adds or less. Rounding the resampled image to 8 bits forbids that, and the large
image is made, concatenated and rounded. SegFormer's decoder was slower in int8 than in float32 for this layer alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torch_hybrid_backend.quantization.residuals import found, keep

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
# What `resample_last` takes: these modes, and images that grow at least so many times.
_MODES = ("nearest", "bilinear")
MIN_GROWTH = 2


class Resampled(TorchFunctionMode):
    """Images that were resampled while a model ran, alone or concatenated with others along the channels."""

    def __init__(self) -> None:
        super().__init__()
        # By tensor: the channels of the image that was resampled, the most where there are several.
        self._channels = WeakTensorKeyDictionary()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = function(*args, **kwargs)
        if function is functional.interpolate:
            self._resamples(result, *args, **kwargs)
        elif function in _CONCATENATIONS:
            self._concatenates(result, *args, **kwargs)
        return result

    def _resamples(
        self,
        result: torch.Tensor,
        input: torch.Tensor,
        size: Any = None,
        factor: Any = None,
        mode: str = "nearest",
        *_: Any,
        **__: Any,
    ) -> None:
        if mode in _MODES and input.dim() == 4 and result.numel() >= MIN_GROWTH * input.numel():
            keep(self._channels, result, input.shape[1])

    def _concatenates(self, result: torch.Tensor, tensors: Any, dim: int = 0, **_: Any) -> None:
        channels = [count for part in tensors if (count := found(self._channels, part)) is not None]
        if channels and dim in (1, -3):
            keep(self._channels, result, max(channels))

    def is_faster_in_float(self, x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> bool:
        """True if the convolution of `x`, (N, I, H, W), by `weight`, (O, I, h, w), goes before a resampling in floating point, on a CPU."""
        channels = found(self._channels, x)
        is_one_pixel = weight.dim() == 4 and weight.shape[2:] == (1, 1) and weight.shape[1] == x.shape[1]
        if channels is None or x.device.type != "cpu" or not is_one_pixel:
            return False
        return bool(weight.shape[0] <= channels and result.shape[2:] == x.shape[2:])
