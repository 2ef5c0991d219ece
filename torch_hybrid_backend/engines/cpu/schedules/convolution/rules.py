"""Convolution: the rules in order; the first that takes a kernel emits it.

`winograd` takes kernels whose weight was transformed for it; `depthwise` and `depthwise_taps` those without sums over channels;
`small_output_channels` those to less than a vector of channels; `direct` every other one, with any number of groups.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import PackedConvKernel
from torch_hybrid_backend.engines.cpu.schedules.convolution.depthwise import depthwise
from torch_hybrid_backend.engines.cpu.schedules.convolution.depthwise_vnni import depthwise_taps
from torch_hybrid_backend.engines.cpu.schedules.convolution.direct import direct
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.small_output_channels import small_output_channels
from torch_hybrid_backend.engines.cpu.schedules.convolution.winograd import winograd
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer


def emit(kernel: PackedConvKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The body of a 1-D or 2-D convolution kernel; accumulates in the compute dtype of the accumulator's dtype."""
    parts = ConvParts(kernel, builder, printer, target)
    for rule in (winograd, depthwise, depthwise_taps, small_output_channels):
        body = rule(parts)
        if body is not None:
            return body
    return direct(parts)
