"""oneDNN's convolutions and linear layers, through PyTorch's operators, in place of a kernel of ours.

Enters: a kernel. Leaves: kernels that together write what it writes, and the weight packed as oneDNN wants it. Example, a convolution
with a ReLU behind it, inside a region whose tensors lie in blocked channels:

    MapKernel: x as NHWC    OperatorKernel: mkldnn::_convolution_pointwise    MapKernel: the ReLU, and back to blocked channels

An input that lies in memory as the operator takes it is read there. The layer's dtype, float32, bfloat16 or float16, is that of its weight:
our kernels multiply narrow ones in float32, oneDNN multiplies them as they are where the processor can, and refuses when timed where it
cannot. Illegal: other dtypes, sizes known only at run time, weights known only at run time. Nothing here imports TVM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.operator_kernel import Operand, OperatorKernel
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packed_operands import repacked
from torch_hybrid_backend.engines.cpu.weights import Weight
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, buffers_of_expr, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Kernel, MapKernel, Store
from torch_hybrid_backend.loops.layout import Strided, contiguous, offset_of
from torch_hybrid_backend.sizes.size import known_int

_DTYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """`kernels`, run one after the other, write what another kernel writes; `packed` is what they read of its weight."""

    kernels: tuple[Kernel, ...]
    packed: Packed


def onednn_convolution(kernel: CpuConvKernel[Weight], weight: Packed | None) -> Replacement | None:
    """The convolution by `mkldnn::_convolution_pointwise`, images and result NHWC; None where it has no such form."""
    sizes = _known([v.extent for v in (*kernel.x_vars, *kernel.domain)])
    dtype = kernel.weight.buffer.dtype
    if weight is None or sizes is None or not _is_taken(kernel, dtype, kernel.x):
        return None
    rank = len(kernel.x_vars)
    (images, channels, *size), (_, outputs, *out) = sizes[:rank], sizes[rank:]
    kernel_size, stride, padding, dilation = kernel.kernel, kernel.stride, kernel.padding, kernel.dilation
    for n, m, k, s, p, d in zip(size, out, kernel_size, stride, padding, dilation, strict=True):
        if m != (n + 2 * p - d * (k - 1) - 1) // s + 1:  # zeros after the image are not as many as those before
            return None
    if len(size) == 1:
        size, out, kernel_size = [1, *size], [1, *out], (1, *kernel_size)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    image = images, channels, *size
    result = images, outputs, *out
    border, read, x = _in_memory(kernel, kernel.x, _two_dimensional(kernel.x_vars), image, _nhwc(image), dtype)
    shape = (outputs, channels // kernel.groups, *kernel_size)
    ahead = partial(
        _pack_convolution,
        shape=shape,
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=kernel.groups,
        image=image,
    )
    packed = weight.repacked(Buffer(shape, dtype, "packed by oneDNN", constant=True), ahead)
    y = _result_of(result, _nhwc(result), dtype)
    arguments = (x, Operand(packed.buffer, shape), None, padding, stride, dilation, kernel.groups, "none", (), None)
    title = f"convolution of {_shown(image)} by {_shown(shape)}"
    title += f", stride {_shown(stride)}, dilation {_shown(dilation)}, groups {kernel.groups}"
    return _replacement(
        kernel,
        border=border,
        x=read,
        packed=packed,
        name="mkldnn::_convolution_pointwise",
        arguments=arguments,
        result=y,
        title=title,
    )


def onednn_linear(kernel: CpuMatMulKernel[Weight], weight: Packed | None) -> Replacement | None:
    """The product with a constant weight by `mkldnn::_linear_pointwise`; None where it has no such form."""
    sizes = _known([v.extent for v in (*kernel.domain, kernel.k)])
    dtype = kernel.weight.buffer.dtype
    if sizes is None or sizes[0] != 1 or not _is_taken(kernel, dtype, kernel.a):
        return None
    _, rows, columns, depth = sizes
    buffer = Buffer((columns, depth), dtype, "packed by oneDNN", constant=True)
    packed = repacked(kernel, weight, buffer, partial(_pack_linear, rows=rows))
    if packed is None:
        return None
    border, read, x = _in_memory(
        kernel, kernel.a, (kernel.domain[1], kernel.k), (rows, depth), contiguous((rows, depth)), dtype
    )
    y = _result_of((rows, columns), contiguous((rows, columns)), dtype)
    arguments = (x, Operand(buffer, (columns, depth)), None, "none", (), None)
    title = f"linear layer of {_shown((rows, depth))} by {_shown((columns, depth))}"
    return _replacement(
        kernel,
        border=border,
        x=read,
        packed=packed,
        name="mkldnn::_linear_pointwise",
        arguments=arguments,
        result=y,
        title=title,
    )


def _replacement(
    kernel: CpuConvKernel[Weight] | CpuMatMulKernel[Weight],
    *,
    border: tuple[Kernel, ...],
    x: Argument,
    packed: Packed,
    name: str,
    arguments: tuple[Operand | int | tuple[int, ...] | str | None, ...],
    result: Operand,
    title: str,
) -> Replacement:
    weight = Argument(packed.buffer, contiguous(packed.buffer.shape))
    y = Argument(result.buffer, Strided(result.strides))
    call = OperatorKernel((x, weight), (y,), (), name, arguments, result, title)
    return Replacement((*border, call, _behind(kernel, y)), packed)


def _result_of(shape: tuple[int, ...], layout: Strided, dtype: str) -> Operand:
    return Operand(Buffer(shape, dtype, "result of oneDNN"), shape, tuple(map(known_int, layout.strides)))


def _known(sizes: Sequence[object]) -> list[int] | None:
    """The sizes, where all of them are known and there is something to compute."""
    found = [size for size in sizes if isinstance(size, int) and size > 0]
    return found if len(found) == len(sizes) else None


def _is_taken(kernel: CpuConvKernel[Weight] | CpuMatMulKernel[Weight], dtype: str, x: Expr) -> bool:
    """True if oneDNN multiplies this dtype, and the kernel computes what it does."""
    return dtype in _DTYPES and {kernel.accumulator.dtype, x.dtype} == {compute_dtype(dtype)}


def _shown(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _nhwc(shape: Sequence[int]) -> Strided:
    """The layout of PyTorch's channels_last tensors of (N, C, H, W)."""
    _, channels, height, width = shape
    return Strided((height * width * channels, 1, width * channels, channels))


def _two_dimensional(variables: Sequence[LoopVar]) -> tuple[LoopVar | None, ...]:
    """Variables of an image, with a place for the height that a 1-D one has not."""
    images, channels, *size = variables
    return (images, channels, None, *size) if len(size) == 1 else tuple(variables)


def _index(variables: Sequence[LoopVar | None]) -> tuple[Index, ...]:
    return tuple(as_index(0) if v is None or v.extent == 1 else Index(((v, 1),), 0) for v in variables)


def _in_memory(
    kernel: Kernel,
    value: Expr,
    variables: Sequence[LoopVar | None],
    shape: tuple[int, ...],
    layout: Strided,
    dtype: str,
) -> tuple[tuple[Kernel, ...], Argument, Operand]:
    """The tensor value[variables] of `shape` and `dtype`, laid out so: where it lies already, or what a kernel before the operator writes."""
    index, strides = _index(variables), tuple(map(known_int, layout.strides))
    if isinstance(value, Load) and not value.buffer.constant and value.buffer.dtype == dtype:
        own = next(a.layout for a in kernel.reads if a.buffer is value.buffer)
        lies = offset_of(own, value.buffer.shape, value.index)
        wanted = offset_of(layout, shape, index)
        if lies.const == wanted.const == 0 and dict(lies.terms) == dict(wanted.terms):
            return (), Argument(value.buffer, own), Operand(value.buffer, shape, strides)
    buffer = Buffer(shape, dtype, "operand of oneDNN")
    argument = Argument(buffer, layout)
    domain = tuple(v for v in variables if v is not None)
    border = MapKernel(_reads(kernel, [value]), (argument,), domain, (Store(buffer, index, value),))
    return (border,), argument, Operand(buffer, shape, strides)


def _behind(kernel: CpuConvKernel[Weight] | CpuMatMulKernel[Weight], result: Argument) -> MapKernel:
    """The kernel that computes the stores from the operator's result."""
    rank, accumulator = len(result.buffer.shape), kernel.accumulator

    def load(of: Load) -> Expr | None:
        if of.buffer is not accumulator:
            return None
        # (1, m, n) -> (m, n); (n, o, w) -> (n, o, 1, w)
        index = (
            of.index[1:]
            if rank == 2
            else of.index
            if len(of.index) == rank
            else (*of.index[:2], as_index(0), of.index[2])
        )
        return result.buffer.at(index)

    replaced = tuple(Store(s.buffer, s.index, replace_loads(s.value, load)) for s in kernel.stores)
    reads = (result, *_reads(kernel, [s.value for s in kernel.stores]))
    return MapKernel(reads, kernel.writes, kernel.domain, replaced)


def _reads(kernel: Kernel, exprs: Sequence[Expr]) -> tuple[Argument, ...]:
    read = {buffer for expr in exprs for buffer in buffers_of_expr(expr)}
    return tuple(argument for argument in kernel.reads if argument.buffer in read)


def _pack_convolution(
    weight: torch.Tensor,
    shape: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    image: Sequence[int],
) -> torch.Tensor:
    """weight: (O, I / groups, *kernel), any strides. Returns oneDNN's own tensor for images of size `image`."""
    plain = weight.reshape(shape)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(plain, padding, stride, dilation, groups, image)
    return packed


def _pack_linear(b: torch.Tensor, rows: int) -> torch.Tensor:
    """b: (1, K, N), any strides. Returns oneDNN's own tensor for `rows` rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(b[0].t().contiguous(), rows)
    return packed
