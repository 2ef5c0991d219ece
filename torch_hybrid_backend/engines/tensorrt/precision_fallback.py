"""Precision fallback of an engine: the rungs that are climbed where a region's results are too far from eager's.

    for rung in rungs_of(region): ...            # as written; products that accumulate in float32; all layers in float32
    widen(module, rung)                          # casts in a lowered graph: networks are strongly typed, and compute what it says

A region is built anew, off the call, for the next rung only where the gate that compares it with eager refuses it. Eager's own kernels
accumulate products, norms and softmax of half types in float32 and round once; what TensorRT does in a network of half types is its own choice.
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


class Rung(StrEnum):
    """In which precision operators of half types are computed; the values are in keys and reports."""

    AS_WRITTEN = "as written"
    # Products, convolutions and attention sum in float32.
    FP32_ACCUMULATION = "fp32 accumulation"
    # That, and every norm, softmax, reduction and function in float32, with the arithmetic between them.
    FP32_LAYERS = "fp32 layers"


# By name, of graphs before and after torch_tensorrt's lowering. What PyTorch has two settings for stays apart.
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
# Computed in float32 where what they read is: rounding between two layers is the error that is to go.
_BETWEEN = frozenset(
    """
    add sub rsub mul div neg where clamp maximum minimum relu leaky_relu abs view reshape _reshape_copy permute transpose expand
    unsqueeze squeeze slice select clone
    """.split()
)


def rungs_of(region: Region) -> tuple[Rung, ...]:
    """The rungs that make a difference for a region, the first first: more than one where products or layers are of half types."""
    computing = [node for node in region.graph_module.graph.nodes if computes(node) and _is_half(_values(node))]
    found = [Rung.AS_WRITTEN]
    if any(map(is_product, computing)):
        found.append(Rung.FP32_ACCUMULATION)
    if any(name(node) in _LAYERS or name(node).startswith(ATTENTION) for node in computing):
        found.append(Rung.FP32_LAYERS)
    return tuple(found)


def keeps_tf32_exact(region: Region, rung: Rung) -> bool:
    """True if the products of a region on a rung lose nothing by TF32: on the higher ones their operands are half types, widened, which have at
    most its 10 bits behind the leading one. A region with products of float32 of its own has others."""
    products = [node for node in region.graph_module.graph.nodes if node.op == "call_function" and is_product(node)]
    return rung is not Rung.AS_WRITTEN and bool(products) and all(_is_half(_values(node)) for node in products)


def name(node: Node) -> str:
    """The name of a node's operator: "addmm"; "" of what is no operator."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""


def is_product(node: Node) -> bool:
    """True if a node sums products: a matrix product, a convolution or attention."""
    called = name(node)
    return called in PRODUCTS or called in CONVOLUTIONS or called.startswith(ATTENTION)


def widen(module: torch.fx.GraphModule, rung: Rung) -> None:
    """Compute what `rung` names in float32, in place, in a lowered graph with metadata. Inputs, outputs and what products read stay as they
    are: a product of widened half types is what TensorRT's kernels for half types that accumulate in float32 are chosen for."""
    if rung is Rung.AS_WRITTEN:
        return
    _Widening(module, rung).run()
    module.graph.eliminate_dead_code()
    module.recompile()


class _Widening:
    """A graph that is being widened. `_wide`: by the value that the graph has, rounded, the same in float32."""

    def __init__(self, module: torch.fx.GraphModule, rung: Rung) -> None:
        self._module = module
        self._graph = module.graph
        self._all_layers = rung is Rung.FP32_LAYERS
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
        """Have a node make float32, and what reads it read that rounded."""
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
        """`source` as float32, one cast for all that read it so, before the `first` of them."""
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
