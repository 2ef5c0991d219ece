"""Convolutions of all forms, beside PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.programs_for_tests import run_program
from tests.engines.triton.regions_for_tests import check
from torch_hybrid_backend.codegen.anchors import over
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, ConvKernel, Store
from torch_hybrid_backend.loops.layout import contiguous

pytest.importorskip("triton")

_CASES = {
    "1x1": (torch.nn.Conv2d(8, 20, 1), (2, 8, 9, 7)),
    "3x3 with padding": (torch.nn.Conv2d(3, 18, 3, padding=1), (1, 3, 12, 11)),
    "stride and dilation": (torch.nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2), (2, 4, 13, 10)),
    "groups": (torch.nn.Conv2d(12, 24, 3, padding=1, groups=3), (1, 12, 8, 8)),
    "depthwise": (torch.nn.Conv2d(10, 10, 5, padding=2, groups=10), (1, 10, 9, 9)),
    "no bias": (torch.nn.Conv2d(5, 7, (2, 3), bias=False), (1, 5, 6, 6)),
    "many channels": (torch.nn.Conv2d(20, 18, 3, padding=(1, 0), stride=(1, 2)), (2, 20, 8, 9)),
    "1x1 with stride": (torch.nn.Conv2d(40, 20, 1, stride=2), (1, 40, 7, 7)),
    "many channels of groups": (torch.nn.Conv2d(40, 34, (1, 3), padding=1, groups=2), (1, 40, 5, 6)),
    "one dimension": (torch.nn.Conv1d(6, 9, 4, stride=3, padding=1), (2, 6, 31)),
}


@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", _CASES)
def test_forms(name: str, is_last: bool, tmp_path: Path) -> None:
    module, shape = _CASES[name]
    weights = [p.detach() for p in module.parameters()]
    x = torch.randn(shape)
    if is_last:
        x, weights[0] = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, weights[0]))

    def convolve(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        bias = weights[1] if len(weights) > 1 else None
        function = torch.conv1d if x.dim() == 3 else torch.conv2d
        return function(x, weights[0], bias, module.stride, module.padding, module.dilation, module.groups).relu()

    check(tmp_path, convolve, x, *weights, kinds=(ConvKernel,), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Halves are summed in float32, and the bias is added before the result is rounded."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((1, 18, 6, 6), (17, 18, 3, 3), (17,)))
    check(tmp_path, lambda x, w, b: torch.nn.functional.conv2d(x, w / 10, b, padding=1), x, w, b)


def test_what_is_computed_is_0_in_the_padding(tmp_path: Path) -> None:
    """The logarithm of an element outside the image would be -inf."""
    x, w = torch.rand(1, 20, 6, 6) + 0.5, torch.randn(18, 20, 3, 3)
    check(tmp_path, lambda x, w: torch.nn.functional.conv2d(x.log(), w, padding=1), x, w, tolerance=1e-4)


def test_three_dimensions() -> None:
    """The schedule is for any number of spatial dimensions. (Lowering refuses three, for every backend.)"""
    x, w, out = (
        Argument(Buffer(shape, "float32"), contiguous(shape))
        for shape in ((2, 16, 3, 4, 4), (9, 16, 2, 3, 3), (2, 9, 2, 4, 2))
    )
    (x_vars, x_value), (w_vars, w_value) = over(x.buffer, "x"), over(w.buffer, "w")
    domain = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(out.buffer.shape))
    point = tuple(map(index_of, domain))
    accumulator = Buffer(out.buffer.shape, "float32", "accumulator")
    stores = (Store(out.buffer, point, accumulator.at(point)),)
    kernel = ConvKernel(
        (x, w),
        (out,),
        domain,
        x_vars,
        x_value,
        w_vars,
        w_value,
        (1, 1, 2),
        (0, 1, 1),
        (1, 1, 1),
        1,
        accumulator,
        stores,
    )
    image, weight = torch.randn(x.buffer.shape), torch.randn(w.buffer.shape)
    wanted = torch.conv3d(image.double(), weight.double(), stride=(1, 1, 2), padding=(0, 1, 1))
    for kernels in ((kernel,), tiled(kernel, Tiling(16, 16, 16, splits=3))):
        memory = {x.buffer: image, w.buffer: weight}
        for each in kernels:
            memory.update(zip((write.buffer for write in each.writes), run_program(each, memory), strict=True))
        torch.testing.assert_close(memory[out.buffer].double(), wanted, rtol=1e-4, atol=1e-4)
