"""Reductions that share a pass over their rows, told by what is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engines.triton.regions_for_tests import kernels_of
from torch_hybrid_backend.engines.triton.schedules.one_pass import passes_of
from torch_hybrid_backend.loops.kernels import RowKernel

_LONG = (64, 100_000)
_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], object], list[str], int]] = {
    # What is joined, and how often a row is read.
    "sum": (lambda x: x.sum(-1), [], 1),
    "var": (lambda x: x.var(-1), ["squares"], 1),
    "var_mean": (lambda x: torch.var_mean(x, -1), ["squares"], 1),
    "written out": (lambda x: ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1), ["squares"], 1),
    "of a sum": (lambda x: (x + x.sin()).std(-1), ["squares"], 1),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), ["squares"], 2),
    "rms": (lambda x: x * (x * x).mean(-1, keepdim=True).rsqrt(), [], 2),
    "softmax": (lambda x: x.softmax(-1), ["exponentials"], 2),
    "log_softmax": (lambda x: x.log_softmax(-1), ["exponentials"], 2),
    "logsumexp": (lambda x: x.logsumexp(-1), ["exponentials"], 1),
    # Another centre than the mean, another element than the maximum is of.
    "around another centre": (lambda x: ((x - x.sum(-1, keepdim=True) / 7) ** 2).sum(-1), [], 2),
    "around another mean": (lambda x: ((x - (x * x).mean(-1, keepdim=True)) ** 2).sum(-1), [], 2),
    "below another maximum": (lambda x: (x - x.abs().amax(-1, keepdim=True)).exp().sum(-1), [], 2),
    "above a minimum": (lambda x: (x.amin(-1, keepdim=True) - x).exp().sum(-1), [], 2),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_that_share_a_pass(name: str, dtype: torch.dtype) -> None:
    """The variance with the sum, the sum of exponentials with the maximum; others have a pass of their own."""
    function, joined, count = _FUNCTIONS[name]
    (kernel,) = kernels_of(function, torch.empty(_LONG, dtype=dtype))  # type: ignore[arg-type]
    assert isinstance(kernel, RowKernel)
    passes = passes_of(kernel)
    # What a half type rounds in between is another element.
    if dtype == torch.float32 or name not in ("written out", "of a sum"):
        assert [each.kind for each in passes.joined.values()] == joined
        assert passes.count == count
