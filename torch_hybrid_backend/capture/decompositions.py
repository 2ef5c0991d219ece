"""Decompositions: ATen operators that are taken apart at capture. The others stay whole.

The aim: engines see few primitives, and each of those has one obvious loop nest or one good library kernel. The table
starts from torch's own core ATen decompositions, loses what stays whole (`KEPT`, random operators, the engines'
`keep_ops`) and gains what core ATen keeps but a loop language need not know (`EXTRA`) and the few formulas of ours at
the end of this file.

Composite operators (`aten.linear`, `aten.matmul`, `aten.dropout`, ...) are taken apart by the dispatcher before a
decomposition table is ever asked; keeping one of those is not possible here. A few others (upsampling) are taken apart
by Python kernels that torch registers for tracing: `whole_upsampling` switches those off.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from torch_hybrid_backend.capture.fixes.encoder_layers import native_multi_head_attention, transformer_encoder_layer
from torch_hybrid_backend.capture.fixes.strides import with_strides_of
from torch_hybrid_backend.graph.schema import is_random
from torch_hybrid_backend.graph.tracing import traced
from torch_hybrid_backend.torch_private import (
    DispatchKey,
    OperatorBase,
    OpOverload,
    OpOverloadPacket,
    core_aten_decompositions,
    detect_fake_mode,
    enable_python_dispatcher,
    get_decompositions,
    suggest_memory_format,
    tree_leaves,
)
from torch_hybrid_backend.torch_private import quantized_decomposed as _decomposed

Operator = OperatorBase
Table = Mapping[Operator, Callable[..., object]]

aten = torch.ops.aten
prims = torch.ops.prims

UPSAMPLING: tuple[OpOverloadPacket, ...] = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
)

# Kept whole although core ATen would take them apart. (Operators that core ATen keeps anyway, such as convolution,
# addmm, gelu or max_pool2d_with_indices, need no mention.)
KEPT: tuple[OpOverloadPacket, ...] = (
    # Pointwise activations: the scalar language lowers each in one expression, with one rounding for half types, and
    # eager has a vectorised kernel for each: whole is better for both.
    aten.silu,
    aten.hardswish,
    aten.hardsigmoid,
    aten.softplus,
    aten.mish,
    # Contractions: engines have schedules and libraries for them; torch's formula for baddbmm doubles the memory
    # traffic.
    aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    # Window and sampling operators: a single kernel in eager and one loop nest in an engine; in torch's formulas they
    # become dozens of index tensors (bicubic: 80 operators) that no fusion brings back.
    *UPSAMPLING,
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.reflection_pad3d,
    aten.replication_pad1d,
    aten.replication_pad2d,
    aten.replication_pad3d,
    aten.im2col,
    aten.col2im,
    # Scatters: eager's kernels need no atomic additions; torch's formulas end in index_put(accumulate=True), which is
    # slower.
    aten.embedding_dense_backward,
    aten.index_add,
    aten.slice_scatter,
    aten.select_scatter,
    # Evaluated batch norm: passes/canonical/fold_batch_norm.py needs to see it whole; what it cannot fold it turns into one
    # multiply-add.
    aten._native_batch_norm_legit_no_training,
)

# Taken apart although core ATen keeps them.
EXTRA: tuple[OpOverloadPacket, ...] = (
    # Normalisations: to reductions and pointwise primitives, so that they fuse with what surrounds them. Variance stays
    # `var_mean`, whose two passes (or Welford's update) an engine chooses itself: E[x^2] - E[x]^2 would cancel.
    aten._softmax,
    aten._log_softmax,
    aten.native_layer_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    # Plain sums, products and powers in disguise.
    aten.addmv,
    aten.dist,
    aten.linalg_vector_norm,
    aten.nll_loss2d_backward,
    aten.tril_indices,
    aten.triu_indices,
    aten.unbind_copy,
    aten.permute_copy,
    # Functionalisation's leftovers.
    aten.bitwise_and_,
    aten.bitwise_or_,
    aten.clamp_min_,
)


def decomposition_table(keep_ops: frozenset[OpOverload]) -> dict[Operator, Callable[..., object]]:
    """The table for AOTAutograd. Operators in `keep_ops` are in no case taken apart.

    Random operators stay whole, so that a compiled model draws the numbers that eager draws from the same generator
    state wherever eager's operator is the same one.
    """
    table = {operator: formula for operator, formula in _full_table().items() if operator not in keep_ops}
    # Dynamo writes steps of Adam with it, and registers it then.
    if hasattr(prims, "fma"):
        table[prims.fma.default] = _multiply_add
    return table


def asked(
    table: dict[Operator, Callable[..., object]], applies: Callable[[str], bool]
) -> dict[Operator, Callable[..., object]]:
    """The table, each of whose formulas is applied only where `applies` says so; else the operator stays whole."""

    def formula_of(operator: Operator, formula: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(formula)
        def applied(*args: object, **kwargs: object) -> object:
            return formula(*args, **kwargs) if applies(f"the decomposition of {operator}") else NotImplemented

        return applied

    return {operator: formula_of(operator, formula) for operator, formula in table.items()}


def decomposed(node: torch.fx.Node, keep_ops: frozenset[OpOverload]) -> torch.fx.GraphModule | None:
    """The graph that capture would have made of an operator, had only `keep_ops` been wanted whole: a graph of its own.

    The graph takes the node's input nodes in the order of `node.all_input_nodes` and returns the operator's results; every node carries
    `meta["val"]`. None where the operator stays whole all the same, where a size known only at run time is among its arguments, or where the
    formula's results have another form (dtype, shape, strides) than the operator's.
    """
    table = decomposition_table(keep_ops)
    values = [source.meta.get("val") for source in node.all_input_nodes]
    mode = detect_fake_mode(values)
    if node.target not in table or mode is None or not all(isinstance(value, torch.Tensor) for value in values):
        return None

    def run(*inputs: object) -> object:
        of = dict(zip(node.all_input_nodes, inputs, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), of.__getitem__)  # type: ignore[arg-type]
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with mode, enable_python_dispatcher():
        graph_module = traced(run, values, table, tracing_mode="real")
    results = [value.meta.get("val") for value in graph_module.graph.output_node().all_input_nodes]
    wanted = [value for value in tree_leaves(node.meta["val"]) if value is not None]
    return graph_module if len(results) == len(wanted) and all(map(_same_form, results, wanted)) else None


def _same_form(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())


@functools.cache
def _full_table() -> Table:
    table: dict[Operator, Callable[..., object]] = {**core_aten_decompositions(), **get_decompositions(list(EXTRA))}
    table.update(_own_formulas())
    kept = {overload for packet in KEPT for overload in _overloads(packet)}
    return MappingProxyType(
        {op: with_strides_of(op, formula) for op, formula in table.items() if op not in kept and not is_random(op)}
    )


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def whole_upsampling() -> Iterator[None]:
    """Trace upsampling as one operator.

    torch registers Python kernels (autograd and composite) that take these operators apart while tracing, whatever the
    decomposition table says (torch/_decomp/decompositions.py). Removing them for the time of the trace leaves C++'s;
    but C++'s composite kernels of the `vec` overloads refuse symbolic sizes, so those get the few lines of them in Python.
    They matter to Python-dispatched calls only, and Dynamo compiles under one lock, so no eager call elsewhere sees
    the difference.
    """
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    operators = [overload for packet in UPSAMPLING for overload in _overloads(packet)]
    before = [(op, key, op.py_kernels.pop(key)) for op in operators for key in keys if key in op.py_kernels]
    for operator, key, formula in before:
        if operator._overloadname == "vec":
            operator.py_kernels[key] = functools.partial(_upsample_by_sizes, operator.overloadpacket.default, formula)
    for operator in operators:
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in before:
            operator.py_kernels[key] = kernel
        for operator in operators:
            operator._dispatch_cache.clear()


def _upsample_by_sizes(
    upsample: OpOverload,
    formula: Callable[..., torch.Tensor],
    x: torch.Tensor,
    output_size: Sequence[int] | None,
    *arguments: Any,
) -> torch.Tensor:
    """Result of a `vec` overload: `arguments` are align_corners, where the operator has it, and the scale factors.

    The backward operators refuse symbolic sizes: where those meet a gradient, torch's `formula` takes upsampling apart. So it does where a
    size depends on data and nothing says that it is positive, which the operator insists on while it is traced.
    """
    *flags, scale_factors = arguments
    sizes = output_size
    if sizes is None:
        sizes = [_scaled(size, scale) for size, scale in zip(x.shape[2:], scale_factors, strict=True)]
    symbolic = any(isinstance(size, torch.SymInt) for size in (*x.shape, *sizes))
    if symbolic and x.requires_grad and torch.is_grad_enabled():
        return formula(x, output_size, *arguments)
    if not all(guard_or_false(size > 0) for size in sizes):
        return formula(x, output_size, *arguments)
    scales = scale_factors if scale_factors is not None else [None] * len(sizes)
    result: torch.Tensor = upsample(x, sizes, *flags, *scales)
    return result


def _scaled(size: Any, scale: float) -> int:
    """A size times a positive scale, rounded down; of a size that is only known at run time by integers, where that is the same."""
    numerator, denominator = float(scale).as_integer_ratio()
    if isinstance(size, torch.SymInt) and numerator < _EXACT_NUMERATOR:
        exact: int = size * numerator // denominator
        return exact
    rounded: int = torch.sym_int(size * scale)  # type: ignore[no-untyped-call]
    return rounded


# Products of a dimension, which has 31 bits, with smaller numbers are exact in float64.
_EXACT_NUMERATOR = 1 << 22


def _convert_element_type(a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's reference formulas cast with a prims operator; engines know `aten._to_copy` alone."""
    cast: torch.Tensor = aten._to_copy.default(a, dtype=dtype)
    return cast


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c. Compilers of kernels make one instruction of it."""
    return a * b + c


def _split_with_sizes(x: torch.Tensor, split_sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """Several outputs become one slice each, so that each can be fused or left alone on its own."""
    pieces: list[torch.Tensor] = []
    start: int = 0
    for size in split_sizes:
        pieces.append(aten.slice.Tensor(x, dim, start, start + size))
        start = start + size
    return pieces


def _roll(x: torch.Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> torch.Tensor:
    """Rolls by slices and one concatenation a dimension; torch's formula makes index tensors and gathers."""
    shifts = (shifts,) if isinstance(shifts, int | torch.SymInt) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not dims:
        flat: torch.Tensor = _roll(x.reshape(-1), shifts, (0,)).reshape(x.shape)
        return flat
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        start = (size - shift) % size if size else 0
        if isinstance(start, int) and start == 0:
            continue
        x = torch.cat((aten.slice.Tensor(x, dim, start, size), aten.slice.Tensor(x, dim, 0, start)), dim)
    return x.clone() if x.numel() == 0 or all(isinstance(s, int) and s == 0 for s in shifts) else x


def _t(x: torch.Tensor) -> torch.Tensor:
    """Decompose to `permute`: one operator for all reorderings of dimensions."""
    transposed: torch.Tensor = aten.permute.default(x, [1, 0]) if x.dim() == 2 else aten.alias.default(x)
    return transposed


def _native_group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group norm in two-pass form, computed in float32 for half types; returns (output, mean, 1/deviation), the latter
    two of shape (batch, groups). torch's formula goes through `as_strided`, which no engine can see through."""
    compute = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    grouped = x.to(compute).reshape(batch, groups, channels // groups, pixels)
    variance, mean = torch.var_mean(grouped, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = ((grouped - mean) * rstd).reshape(x.shape)
    broadcast = [1, channels] + [1] * (x.dim() - 2)
    if weight is not None:
        out = out * weight.reshape(broadcast)
    if bias is not None:
        out = out + bias.reshape(broadcast)
    # Eager keeps channels-last inputs channels-last.
    out = out.to(x.dtype).contiguous(memory_format=suggest_memory_format(x))
    return out, mean.reshape(batch, groups).to(x.dtype), rstd.reshape(batch, groups).to(x.dtype)


def _convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """The gradients of a 2-D convolution apart, each as what kernels are good at.

    gradient (N, O, h, w), x (N, I, H, W), weight (O, I / groups, kh, kw) -> (gradient of x, of weight, of bias), None where `mask` has False.

    - The image's is a convolution itself, of the gradient by the weight turned around, if the stride is 1. Libraries convert its operands to
      their layouts and back in each call; here it is compiled, together with what surrounds it. With larger strides it stays whole, unless
      windows lie side by side.
    - The weight's is one matrix product where there are few output positions, (O, N h w) @ (N h w, I kh kw). Libraries choose their loops for
      large images: with 2x2 positions oneDNN's took 3 times its own forward pass. The unfolded input is no larger than the gradient itself
      where N h w <= O. Of large images it stays whole.
    - Of a transposed convolution the two change places: the image's is the convolution of the gradient, and the weight's that of a convolution
      from `gradient` to `x`.
    """
    if (
        not _is_static(gradient, x, weight)
        or not gradient.numel()
        or (weight.dim(), x.dim()) != (4, 4)
        or x.device.type != "cpu"
        or (gradient.dtype, x.dtype, weight.dtype) not in {(torch.float32,) * 3, (torch.float64,) * 3}
        or any(more >= step for more in output_padding for step in stride)
    ):
        return NotImplemented
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    s, p, d = ([value[0], value[-1]] for value in (stride, padding, dilation))
    of_image = None
    if mask[0] and transposed:
        of_image = aten.convolution.default(gradient, weight, None, s, p, d, False, [0, 0], groups)
    elif mask[0]:
        of_image = _image_gradient(gradient, x, weight, s, p, d, groups)
    small, large = (x, gradient) if transposed else (gradient, x)
    of_weight = _weight_gradient(small, large, weight, s, p, d, groups) if mask[1] else None
    whole = [mask[0] and of_image is None, mask[1] and of_weight is None, False]
    if whole[:2] == [*mask[:2]]:
        return NotImplemented
    if any(whole):
        rest = aten.convolution_backward.default(gradient, x, weight, None, *geometry, whole)
        of_image = rest[0] if whole[0] else of_image
        of_weight = rest[1] if whole[1] else of_weight
    return of_image, of_weight, gradient.sum((0, 2, 3)) if mask[2] else None


def _image_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor | None:
    """The gradient of a convolution's image as a convolution; None where no kernel computes it so."""
    kernel = weight.shape[2:]
    if groups == 1 and [*kernel] == [*stride] and not any(padding) and {*dilation} == {1} and max(kernel) > 1:
        beyond = [n - m * step for n, m, step in zip(x.shape[2:], gradient.shape[2:], stride, strict=True)]
        if not any(beyond):  # windows side by side
            spread: torch.Tensor = aten.convolution.default(
                gradient, weight, None, stride, padding, dilation, True, [0, 0], 1
            )
            return spread
    around = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    is_depthwise = groups == x.shape[1] == weight.shape[0]
    if {*stride, *dilation} != {1} or min(around) < 0 or (groups != 1 and not is_depthwise):
        return None
    turned = weight.flip((2, 3)) if max(kernel) > 1 else weight
    turned = turned if is_depthwise else turned.transpose(0, 1)
    convolved: torch.Tensor = aten.convolution.default(
        gradient, turned, None, [1, 1], around, [1, 1], False, [0, 0], groups
    )
    return convolved


def _weight_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor | None:
    """The gradient of a convolution's weight as a matrix product; None where that would be slow."""
    outputs, inputs, *kernel = weight.shape
    pixels = gradient.numel() // outputs
    if groups != 1 or pixels > outputs or (weight.is_contiguous() and weight.stride(3) != 1):  # 1x1: strides of its own
        return None
    columns = aten.im2col.default(x, kernel, dilation, padding, stride)
    columns = columns.reshape(x.shape[0], inputs * math.prod(kernel), -1)
    rows = gradient.reshape(x.shape[0], outputs, -1).permute(1, 0, 2).reshape(outputs, pixels)
    product = torch.mm(rows, columns.permute(0, 2, 1).reshape(pixels, -1)).reshape(weight.shape)
    return product.contiguous(memory_format=suggest_memory_format(weight))


def _is_static(*tensors: torch.Tensor) -> bool:
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _addition(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def with_scalar(x: torch.Tensor, other: float, alpha: float = 1) -> torch.Tensor:
        return operator(x, other * alpha if alpha != 1 else other)

    return with_scalar


def _own_formulas() -> Table:
    return {
        prims.convert_element_type.default: _convert_element_type,
        aten.split_with_sizes.default: _split_with_sizes,
        aten.roll.default: _roll,
        aten.t.default: _t,
        aten.native_group_norm.default: _native_group_norm,
        aten.convolution_backward.default: _convolution_backward,
        aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
        aten._native_multi_head_attention.default: native_multi_head_attention,
        # PyTorch describes its results as float64 and int64, and returns float32 (2.13): a graph with the operator in it tells wrong dtypes.
        torch.ops.quantized_decomposed.choose_qparams_per_token.default: _decomposed.choose_qparams_per_token,
        # Scalar overloads: one spelling of each arithmetic operator.
        aten.add.Scalar: _addition(aten.add.Tensor),
        aten.sub.Scalar: _addition(aten.sub.Tensor),
        aten.mul.Scalar: aten.mul.Tensor,
        aten.div.Scalar: aten.div.Tensor,
    }
