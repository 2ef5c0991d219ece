"""A roofline estimate of a region's time, for `placement=estimate`: nothing is run.

    time = calls * overhead + max(flops / peak, bytes / bandwidth)

Eager makes one call per operator, and each operator reads and writes memory. An engine is assumed to fuse everything between
products (matrix products, convolutions, attention). Then there is one call per kernel, and only the region's inputs and
outputs and the products' operands go through memory.

Peak, bandwidth and overhead are those of a CPU. For other devices there is no estimate, which is better than a wrong one (`roofline`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.fx

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.partition.flops import node_flops
from torch_hybrid_backend.sizes.size import size_hint


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's peak rates and the costs of calls on it. Only ratios matter."""

    flops_per_second: float
    bytes_per_second: float
    operator_us: float  # of one ATen operator in eager, whatever it computes
    view_us: float
    kernel_us: float  # of one kernel of an engine

    def work_us(self, flops: int, size_bytes: int) -> float:
        """Microseconds of the work alone: of floating-point operations, or of bytes through memory."""
        return max(flops / self.flops_per_second, size_bytes / self.bytes_per_second) * 1e6


# A call of Python from the C++ plan, with its arguments wrapped and its results unwrapped (docs/performance.md).
CALLBACK_US = 10.0

# One thread of a current x86 server core: two 16-lane multiply-adds per cycle at 3 GHz, halved for what real kernels reach; its share of the
# memory bandwidth; the dispatcher's time per ATen operator; a kernel call from C++.
_CPU_THREAD = Roofline(1e11, 1e10, operator_us=3.0, view_us=1.0, kernel_us=0.5)


def roofline(device: Device) -> Roofline | None:
    """The device's roofline with PyTorch's current number of threads. None if it is not known: then nothing on the device is estimated."""
    if not device.is_host:
        return None
    threads = torch.get_num_threads()
    return replace(
        _CPU_THREAD,
        flops_per_second=_CPU_THREAD.flops_per_second * threads,
        bytes_per_second=_CPU_THREAD.bytes_per_second * threads,
    )


def eager_us(region: Region, on: Roofline) -> float:
    """Estimated microseconds of one call of the region in eager."""
    total = 0.0
    for node in _operators(region):
        if is_item(node):
            continue
        if is_view(node):
            total += on.view_us
        else:
            total += on.operator_us + on.work_us(node_flops(node), _traffic(node))
    return total


def engine_us(region: Region, compiled: CompiledRegion, on: Roofline) -> float:
    """Estimated microseconds of one call of the region as an engine compiled it. Steps that only Python can run cost a callback each."""
    if compiled.program is None:
        return fused_us(region, on)
    steps = compiled.program.steps
    return fused_us(region, on, len(steps)) + CALLBACK_US * sum(step.runs_in_python for step in steps)


def fused_us(region: Region, on: Roofline, kernels: int | None = None) -> float:
    """Estimated microseconds of one call of the region on an engine. `kernels`: their number; None if the region is not compiled yet."""
    flops = traffic = products = 0
    for node in _operators(region):
        work = node_flops(node)
        if work:
            flops, traffic, products = flops + work, traffic + _traffic(node), products + 1
    nodes = region.graph_module.graph.nodes
    traffic += sum(value_bytes(node.meta.get("val")) for node in nodes if node.op == "placeholder")
    returned = next(node for node in reversed(nodes) if node.op == "output")
    traffic += sum(value_bytes(node.meta.get("val")) for node in returned.all_input_nodes)
    return (products + 1 if kernels is None else kernels) * on.kernel_us + on.work_us(flops, traffic)


def copy_us(read: TensorSpec, written: TensorSpec, on: Roofline) -> float:
    """Estimated microseconds of copying a value from one form into another. Sizes known only at run time count with their hints."""
    return on.kernel_us + on.work_us(0, sum(map(_spec_bytes, (read, written))))


def _spec_bytes(spec: TensorSpec) -> int:
    sizes = zip(spec.shape, spec.strides, strict=True)
    return spec.torch_dtype.itemsize * math.prod(size_hint(size) for size, stride in sizes if stride != 0)


def _operators(region: Region) -> list[torch.fx.Node]:
    return [node for node in region.graph_module.graph.nodes if node.op == "call_function"]


def _traffic(node: torch.fx.Node) -> int:
    return value_bytes(node.meta.get("val")) + sum(
        value_bytes(source.meta.get("val")) for source in node.all_input_nodes
    )


def value_bytes(value: object) -> int:
    if isinstance(value, list | tuple):
        return sum(map(value_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    # Symbolic sizes count with the value they had at capture; broadcast dimensions (stride 0) are one element in
    # memory.
    sizes = [size if isinstance(size, int) else (size.node.hint or 0) for size in value.shape]
    broadcast = [isinstance(stride, int) and stride == 0 for stride in value.stride()]
    return value.itemsize * math.prod(size for size, repeated in zip(sizes, broadcast, strict=True) if not repeated)
