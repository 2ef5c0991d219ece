"""Buffers of a region that have their channels innermost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.codegen.regions_for_tests import region_of
from tests.fake_devices import FakeDevices
from tests.partition.engines_for_tests import LoopsEngine
from tests.partition.test_devices import Block, planned
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.layouts import channels_last_layouts
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import fuse
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.loops.layout import Strided, contiguous

HOPPER = Target(90, 132)


def two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = functional.max_pool2d(functional.conv2d(x, w).relu(), 2)
    return functional.conv2d(y * y.mean((2, 3), keepdim=True), v).flatten(1).softmax(-1)


@pytest.mark.parametrize(
    ("dtype", "tf32", "is_last"),
    [
        (torch.float16, False, True),
        (torch.bfloat16, False, True),
        (torch.float32, True, True),
        (torch.float32, False, False),
    ],
)
def test_what_tensor_cores_compute_has_its_channels_innermost(dtype: torch.dtype, tf32: bool, is_last: bool) -> None:
    """All images inside the region, what lies between two convolutions included; its ends lie as the graph says."""
    region = region_of(
        two, torch.randn(2, 4, 12, 12).to(dtype), torch.randn(8, 4, 3, 3).to(dtype), torch.randn(4, 8, 3, 3).to(dtype)
    )
    backend = TritonBackend(dataclasses.replace(HOPPER, convolution_tf32=tf32))
    lowered = lower_region(region, backend.policy)
    groups = fuse(lowered, backend.policy)
    ends = {buffer: contiguous(buffer.shape) for buffer in (*lowered.inputs, *lowered.outputs)}
    layouts = channels_last_layouts(groups, ends, backend.target)
    inside = {member.op.out for group in groups for member in group.members} - ends.keys()
    images = [buffer for buffer in inside if len(buffer.shape) == 4 and buffer.shape[2] != 1]
    assert len(images) >= 3
    for buffer in images:
        _, c, h, w = buffer.shape
        assert layouts[buffer] == Strided((c * h * w, 1, w * c, c) if is_last else (c * h * w, h * w, w, 1))
    assert all(layouts[buffer] == layout for buffer, layout in ends.items())


def test_grouped_convolutions_keep_their_layout() -> None:
    """cuDNN is slower with channels innermost there."""
    x, w = torch.randn(2, 4, 6, 6).half(), torch.randn(8, 2, 3, 3).half()
    region = region_of(lambda x, w: functional.conv2d(x * 2, w, groups=2) + 1, x, w)
    assembled = assemble(region, TritonBackend(HOPPER))
    assert all(
        layout == contiguous(buffer.shape) for buffer, layout in assembled.layouts.items() if isinstance(buffer, Buffer)
    )


def test_a_resnet_copies_nothing_between_its_convolutions() -> None:
    """Each reads what the one before it left, its weight was brought into that form ahead of calls: only the image is converted."""
    devices = FakeDevices()
    head = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 1)
    )
    module = devices.move(nn.Sequential(head, Block()).half().eval(), "cuda:0")
    x = devices.tensor(2, 3, 64, 64, device="cuda:0", dtype=torch.float16)
    (segment,) = planned(devices, [LoopsEngine(devices=["cuda"])], module, x).graph.segments
    assembled = assemble(segment.region, TritonBackend(HOPPER))
    convolutions = [kernel for kernel in assembled.kernels if isinstance(kernel, ConvKernel)]
    before = []
    for kernel in convolutions:
        preferred, *_ = assembled.backend.alternatives(kernel, {})
        assert preferred.is_preferred
        calls = [isinstance(k, OperatorKernel) for k in preferred.kernels]
        before.append(calls.index(True))
        # Of one tap it lies so already.
        assert [p.buffer.constant for p in preferred.packed] == ([] if kernel.w_vars[2].extent == 1 else [True])
    assert before == [1] + [0] * (len(convolutions) - 1)
    assert len(convolutions) == 4
