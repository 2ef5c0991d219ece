"""Convolutions of images whose sizes are known only at run time: one trace for all sizes.

PyTorch chooses a library for a convolution by its sizes (oneDNN from 20,480 elements on), and tracing asks for the choice to know the memory
format of the result. So a trace would hold for sizes on one side of the limit alone, for each layer, and other sizes would be compiled anew.
On the CPU the format is the same for all libraries, but for dilated or 3-D convolutions of channels-last images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from torch_hybrid_backend.torch_private import choose_conv_backends_by, hint_of, is_compiling_for

_of_all_sizes: ContextVar[bool] = ContextVar("convolutions of all sizes", default=False)


def trace_convolutions_of_all_sizes(package: str) -> None:
    """Have traces choose libraries by the sizes of the call that is traced, and assume nothing of others: from now on, where Dynamo compiles
    for a backend of a package, and within `convolutions_of_all_sizes`."""

    def chosen(choose: Any, x: torch.Tensor, weight: torch.Tensor, **settings: Any) -> Any:
        is_known = all(isinstance(size, int) for size in (*x.shape, *x.stride()))
        if is_known or x.device.type != "cpu" or not (_of_all_sizes.get() or is_compiling_for(package)):
            return choose(x, weight, **settings)
        of_call = _of_call(x)
        has_one_format = of_call.is_contiguous() or (x.dim() == 4 and all(n == 1 for n in settings["dilation"]))
        return choose(of_call if has_one_format else x, weight, **settings)

    choose_conv_backends_by(chosen)


@contextlib.contextmanager
def convolutions_of_all_sizes() -> Iterator[None]:
    """Have traces of this thread choose so, whoever they are for."""
    token = _of_all_sizes.set(True)
    try:
        yield
    finally:
        _of_all_sizes.reset(token)


def _of_call(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the sizes and strides that the traced call has."""
    sizes, strides = (
        [n if isinstance(n, int) else hint_of(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
