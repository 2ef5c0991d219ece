"""Precision fallback of an engine: more accurate accumulation, step by step, for a region whose results differ too much from eager's.

    for accumulation in accumulation_precisions(region): ...     # as written; products accumulate in float32; all layers in float32
    widen(module, accumulation)                                  # casts in a lowered graph: TensorRT's strongly typed networks obey them

If the accuracy check refuses a region, the region is built anew, off the call, with the next accumulation precision. Eager's kernels
accumulate products, norms and softmax of half types in float32 and round once. TensorRT chooses its own way in a network of half types.
"""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.graph.precision import computes
from torch_hybrid_backend.graph.schema import is_item
from torch_hybrid_backend.torch_private import OpOverload, tree_leaves, tree_map

aten = torch.ops.aten

_HALF = frozenset({torch.float16, torch.bfloat16})


class AccumulationPrecision(StrEnum):
    """Precision in which operators of half types accumulate or compute, from fast to exact. The values appear in keys and reports."""

    AS_WRITTEN = "as written"
    # Products, convolutions and attention accumulate in float32.
    FP32_ACCUMULATION = "fp32 accumulation"
    # In addition every norm, softmax, reduction and function is computed in float32, with the arithmetic between them.
    FP32_LAYERS = "fp32 layers"


# Operator names in graphs before and after torch_tensorrt's lowering. PyTorch has separate TF32 settings for products and convolutions.
PRODUCTS = frozenset(
    "mm bmm addmm baddbmm addbmm linear matmul mv addmv dot vdot inner _cdist_forward _pdist_forward".split()
)
CONVOLUTIONS = frozenset("convolution _convolution cudnn_convolution conv1d conv2d conv3d".split())
ATTENTION = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")
_LAYERS = frozenset(
    """
    native_layer_norm layer_norm native_group_norm group_norm native_batch_norm batch_norm instance_norm rms_norm _fused_rms_norm
    _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update cudnn_batch_norm
    _softmax softmax _log_softmax log_softmax logsumexp mean sum prod var std var_mean norm linalg_vector_norm cumsum
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d grid_sampler_2d
    exp exp2 expm1 log log2 log10 log1p pow sqrt rsqrt reciprocal erf gelu sigmoid tanh silu mish softplus elu celu selu
    sin cos tan asin acos atan sinh cosh asinh acosh atanh
    """.split()
)
# Operators that are computed in float32 if their inputs are: this avoids rounding between two layers.
_BETWEEN = frozenset(
    """
    add sub rsub mul div neg where clamp maximum minimum relu leaky_relu abs view reshape _reshape_copy permute transpose expand
    unsqueeze squeeze slice select clone
    """.split()
)


def accumulation_precisions(region: Region) -> tuple[AccumulationPrecision, ...]:
    """The accumulation precisions that make a difference for a region, from fast to exact. There is one if nothing is in half types."""
    computing = [node for node in region.graph_module.graph.nodes if computes(node) and _is_half(_values(node))]
    found = [AccumulationPrecision.AS_WRITTEN]
    if any(map(is_product, computing)):
        found.append(AccumulationPrecision.FP32_ACCUMULATION)
    if any(name(node) in _LAYERS or name(node).startswith(ATTENTION) for node in computing):
        found.append(AccumulationPrecision.FP32_LAYERS)
    return tuple(found)


def keeps_tf32_exact(region: Region, accumulation: AccumulationPrecision) -> bool:
    """True if TF32 does not change the products of a region: their operands are widened half types, whose mantissa has at most TF32's 10 bits.

    False as written, and for a region with float32 products of its own.
    """
    products = [node for node in region.graph_module.graph.nodes if node.op == "call_function" and is_product(node)]
    return (
        accumulation is not AccumulationPrecision.AS_WRITTEN
        and bool(products)
        and all(_is_half(_values(node)) for node in products)
    )


def name(node: Node) -> str:
    """The name of a node's operator, such as "addmm"; "" if the node is no operator."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""


def is_product(node: Node) -> bool:
    """True if a node sums products: a matrix product, a convolution or attention."""
    called = name(node)
    return called in PRODUCTS or called in CONVOLUTIONS or called.startswith(ATTENTION)


def widen(module: torch.fx.GraphModule, accumulation: AccumulationPrecision) -> None:
    """Insert casts into a lowered graph with metadata, in place, so that it computes with this accumulation precision.

    Inputs, outputs and the operands of products keep their half types before the casts: for a product of widened half types TensorRT chooses
    its half kernels that accumulate in float32.
    """
    if accumulation is AccumulationPrecision.AS_WRITTEN:
        return
    _Widening(module, accumulation).run()
    module.graph.eliminate_dead_code()
    module.recompile()


class _Widening:
    """A graph that is being widened. `_wide`: rounded value of the graph -> the same value in float32."""

    def __init__(self, module: torch.fx.GraphModule, accumulation: AccumulationPrecision) -> None:
        self._module = module
        self._graph = module.graph
        self._all_layers = accumulation is AccumulationPrecision.FP32_LAYERS
        self._wide: dict[Node, Node] = {}
        self._casts: dict[Node, Node] = {}
        self._widened: set[Node] = set()

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            if is_item(node) and node.args[0] in self._widened:
                self._narrow(node)
            elif _is_half(_values(node)) and self._is_meant(node):
                self._compute_wide(node)

    def _is_meant(self, node: Node) -> bool:
        if is_product(node):
            return True
        if not self._all_layers:
            return False
        return name(node) in _LAYERS or (
            name(node) in _BETWEEN and any(each in self._wide for each in node.all_input_nodes)
        )

    def _compute_wide(self, node: Node) -> None:
        rounds = is_product(node)
        for source in node.all_input_nodes:
            if _is_half(self._values_of(source)):
                wide = None if rounds else self._wide.get(source)
                node.replace_input_with(source, wide or self._cast(source, node))
        node.args, node.kwargs = (tree_map(_wide_dtype, each) for each in (node.args, node.kwargs))
        self._widened.add(node)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._narrow(node)
        else:
            node.meta["val"] = tree_map(_wide_value, node.meta["val"])

    def _narrow(self, node: Node) -> None:
        """Have a node compute float32, and let its readers read the rounded result."""
        before = node.meta["val"]
        if before.dtype not in _HALF:
            return
        node.meta["val"] = _wide_value(before)
        with self._graph.inserting_after(node):
            rounded = self._graph.call_function(aten._to_copy.default, (node,), {"dtype": before.dtype})
        rounded.meta = {**node.meta, "val": before}
        node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
        self._wide[rounded] = node

    def _cast(self, source: Node, first: Node) -> Node:
        """`source` as float32: one cast for all readers, in front of the `first` of them."""
        if source not in self._casts:
            with self._graph.inserting_before(first):
                made = self._graph.call_function(aten._to_copy.default, (source,), {"dtype": torch.float32})
            (value,) = self._values_of(source)
            made.meta = {**source.meta, "val": _wide_value(value)}
            self._casts[source] = made
        return self._casts[source]

    def _values_of(self, node: Node) -> list[torch.Tensor]:
        if node.op == "get_attr" and "val" not in node.meta:
            return [operator.attrgetter(str(node.target))(self._module)]
        return _values(node)


def _values(node: Node) -> list[torch.Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def _is_half(values: list[torch.Tensor]) -> bool:
    return bool(values) and values[0].dtype in _HALF


def _wide_value(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _wide_dtype(argument: Any) -> Any:
    return torch.float32 if argument in _HALF else argument
