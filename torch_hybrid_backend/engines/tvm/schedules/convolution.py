"""Convolution: the rules in order; the first that takes a kernel emits it.

`winograd` takes kernels whose weight was transformed for it; `depthwise` those without sums over channels;
`few_outputs` those to less than a vector of channels; `direct` every other one, with any number of groups.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt
from torch_hybrid_backend.engines.tvm.printer import Printer
from torch_hybrid_backend.engines.tvm.schedules.conv_parts import ConvParts
from torch_hybrid_backend.engines.tvm.schedules.depthwise import depthwise
from torch_hybrid_backend.engines.tvm.schedules.direct_convolution import direct
from torch_hybrid_backend.engines.tvm.schedules.few_outputs import few_outputs
from torch_hybrid_backend.engines.tvm.schedules.winograd import winograd
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.kernels import ConvKernel


def emit(kernel: ConvKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The body of a 1-D or 2-D convolution kernel; accumulates in the compute dtype of the accumulator's dtype."""
    parts = ConvParts(kernel, builder, printer, target)
    for rule in (winograd, depthwise, few_outputs):
        body = rule(parts)
        if body is not None:
            return body
    return direct(parts)
