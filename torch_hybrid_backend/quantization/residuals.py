"""Operands of additions and average poolings that are quantized: those that convolutions read or make, too.

A residual network adds to what a convolution makes what was there before:

    out = batch_norm(conv(...)) + x        x is also what the block's first convolution reads, quantized

The batch norm may be missing, and an activation may follow, as in Darknet and YOLO. The addition belongs to that convolution's kernel, and `x`
comes from memory: as the integers that the other convolution reads it is a quarter of the bytes, and nobody writes it in float32. Where
convolutions make both operands (a shortcut has one of its own), the one that is made first is quantized, in a range of its own.

An average pooling beside convolutions reads what they read, in their range: where a concatenation has several branches behind it, as in
Inception, nobody writes it in float32 for that one. An average is rounded less than what it is of.

Sums of other layers stay as they are: the residual stream of a transformer has outliers for which one scale is too coarse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

OTHER, VALUES = " other", " values"  # behind a site's name: its second operand; an attention's third
# Functions of one tensor, element by element, that belong to the kernel of the convolution before them.
_ACTIVATIONS = frozenset(
    getattr(module, name)
    for module, names in (
        (
            functional,
            "relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu silu mish gelu hardswish hardtanh hardtanh_",
        ),
        (torch, "relu relu_ tanh sigmoid"),
        (torch.Tensor, "relu relu_ tanh sigmoid"),
    )
    for name in names.split()
)
# By operand: the name of what its range is found for, a convolution's or the addition's own; None for one that stays as it is.
Sources = tuple["str | None", ...]


class Residuals(TorchFunctionMode):
    """Values that convolutions have read and made while a model runs. While it is active, it sees batch norms, activations and paddings with
    zeros, which are part of a convolution.

    A tensor that has been written to since is no longer what was read or made.
    """

    def __init__(self) -> None:
        super().__init__()
        # By tensor, each with the tensor's version: the name of the first convolution that read it; how many were made by then; what it pads.
        self._read = WeakTensorKeyDictionary()
        self._made = WeakTensorKeyDictionary()
        self._padded = WeakTensorKeyDictionary()
        self._count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        source = args[0] if args else kwargs.get("input")
        follows = function is functional.batch_norm or function in _ACTIVATIONS
        is_made = follows and found(self._made, source) is not None
        result = function(*args, **kwargs)
        if is_made:
            self._makes(result)
        elif function is functional.pad and _pads_zeros(*args, **kwargs):
            keep(self._padded, result, source)
        return result

    def convolution(self, name: str, x: torch.Tensor, result: torch.Tensor) -> None:
        """A convolution has read `x`, which is quantized for it in the range that is found for `name`, and made `result`."""
        # Zero changes no range. A padding by nothing is a copy: what was padded is read as well.
        for image in (x, found(self._padded, x)):
            if image is not None and found(self._read, image) is None:
                keep(self._read, image, name)
        self._makes(result)

    def _makes(self, result: torch.Tensor) -> None:
        self._count += 1
        keep(self._made, result, self._count)

    def sources(self, name: str, *operands: torch.Tensor) -> Sources:
        """Sources of the ranges of the operands of an addition or a pooling of that name."""
        if len(operands) == 1:
            return (found(self._read, operands[0]),)
        x, y = operands
        if x.shape != y.shape or x.dtype != y.dtype:
            return None, None
        read = found(self._read, x), found(self._read, y)
        made = found(self._made, x), found(self._made, y)
        for own, other in ((0, 1), (1, 0)):
            if made[own] is not None and read[own] is None and read[other] is not None:
                return (read[0], None) if other == 0 else (None, read[1])
        if None in made or read != (None, None):
            return None, None
        return (name, None) if made[0] < made[1] else (None, name + OTHER)


def _pads_zeros(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> bool:
    return mode == "constant" and not value


def keep(known: WeakTensorKeyDictionary, x: torch.Tensor, what: Any) -> None:
    if not x.is_inference():  # these do not count who writes to them
        known[x] = x._version, what


def found(known: WeakTensorKeyDictionary, x: Any) -> Any:
    """Facts of a tensor that nobody has written to since; None for others."""
    if not isinstance(x, torch.Tensor) or x not in known:
        return None
    version, what = known[x]
    return what if x._version == version else None
