"""Convolution by vectors: the weight's form chooses the rule.

`winograd` takes a `Winograd` weight, `depthwise_taps` one in `Taps`. Of `Panels` the first rule that serves emits the kernel: `depthwise`
without sums over channels, `small_output_channels` to less than a vector of channels, `pixel_pairs` by products of two pixels, `direct` every
other one, with any number of groups.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.schedules.convolution.depthwise import depthwise
from torch_hybrid_backend.engines.cpu.schedules.convolution.depthwise_vnni import depthwise_taps
from torch_hybrid_backend.engines.cpu.schedules.convolution.direct import direct
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.pixel_pairs import pixel_pairs
from torch_hybrid_backend.engines.cpu.schedules.convolution.small_output_channels import small_output_channels
from torch_hybrid_backend.engines.cpu.schedules.convolution.winograd import winograd
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Panels, Taps, Winograd


def emit(kernel: CpuConvKernel[Panels | Winograd | Taps], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The body of a 1-D or 2-D convolution kernel; accumulates in the compute dtype of the accumulator's dtype."""
    parts = ConvParts(kernel, builder, printer, target)
    match kernel.weight:
        case Winograd():
            return winograd(parts)
        case Taps():
            return depthwise_taps(parts)
    for rule in (depthwise, small_output_channels, pixel_pairs):
        body = rule(parts)
        if body is not None:
            return body
    return direct(parts)
