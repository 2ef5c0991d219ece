"""Convolutions of images whose sizes are known only at run time: one trace for all sizes.

PyTorch chooses a library for a convolution by its sizes (oneDNN from 20,480 elements on), and tracing asks for the choice to know the memory
format of the result. So a trace would hold for sizes on one side of the limit alone, for each layer, and other sizes would be compiled anew.
On the CPU the format is the same for all libraries, but for dilated or 3-D convolutions of channels-last images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_hybrid_backend.torch_private import conv_backend_chooser, hint_of, while_compiling_for


def trace_convolutions_of_all_sizes(package: str) -> None:
    """Have Dynamo trace convolutions so, from now on, where it compiles for a backend of a package."""
    while_compiling_for(package, convolutions_of_all_sizes)


@contextlib.contextmanager
def convolutions_of_all_sizes() -> Iterator[None]:
    """Traces choose libraries by the sizes of the call that is traced, and assume nothing of others."""
    with conv_backend_chooser(_chosen):
        yield


def _chosen(choose: Any, x: torch.Tensor, weight: torch.Tensor, **settings: Any) -> Any:
    """PyTorch's choice `choose` for tensors of the sizes that the traced call has."""
    of_call = _of_call(x)
    has_one_format = of_call.is_contiguous() or (x.dim() == 4 and all(n == 1 for n in settings["dilation"]))
    if x.device.type != "cpu" or not has_one_format:
        return choose(x, weight, **settings)
    return choose(of_call, _of_call(weight), **settings)


def _of_call(tensor: torch.Tensor) -> torch.Tensor:
    if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor
    sizes, strides = (
        [n if isinstance(n, int) else hint_of(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
