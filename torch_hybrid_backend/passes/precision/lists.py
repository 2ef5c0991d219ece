"""Four lists of ATen operators, by the effect of half precision on them. An operator on no list stays as written.

ALLOW   faster in half precision, and accurate: sums of products are accumulated in float32
INFER   accurate enough on half values, but not worth a cast: follows its inputs, unless it comes after a DENY operator
CLEAR   moves or picks values, so that rounding may come before or after
DENY    makes large errors from small ones: computes in float32, as do the readers of its results

Contents: PyTorch's autocast for CPUs (aten/src/ATen/autocast_mode.cpp, 2.13) and TensorFlow's auto mixed precision
(grappler/optimizers/auto_mixed_precision_lists.h, 2020). Unlike there, means and sums follow their inputs, as they accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import Node

from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.torch_private import OpOverload, OpOverloadPacket, tree_leaves

aten = torch.ops.aten


def packets(names: str) -> frozenset[OpOverloadPacket]:
    """The named operators, without those that this version of PyTorch lacks."""
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


ALLOW = packets(
    "convolution mm bmm mv addmm addmv addbmm baddbmm linear matmul scaled_dot_product_attention "
    "_scaled_dot_product_flash_attention_for_cpu"
)
INFER = packets(
    "add sub rsub mul div addcmul addcdiv lerp pow square sqrt rsqrt reciprocal log log1p log2 log10 erf erfc atan "
    "sigmoid log_sigmoid_forward tanh gelu silu elu celu leaky_relu _prelu_kernel hardswish hardsigmoid softplus mish glu "
    "sum mean var var_mean _softmax _log_softmax "
    "native_layer_norm native_group_norm _native_batch_norm_legit_no_training "
    "avg_pool2d _adaptive_avg_pool2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
)
_FILLS = packets("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
_FORMS = packets("sym_size sym_numel sym_stride sym_storage_offset")
CLEAR = _FILLS | packets(
    "relu clamp clamp_min clamp_max hardtanh abs neg sign maximum minimum amax amin "
    "max_pool2d_with_indices cat stack clone constant_pad_nd gather index_select index flip roll repeat where masked_fill "
    "upsample_nearest1d upsample_nearest2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "pixel_shuffle pixel_unshuffle im2col slice_scatter select_scatter"
)
DENY = packets(
    "exp exp2 expm1 sin cos tan asin acos sinh cosh asinh acosh atanh logit erfinv lgamma digamma "
    "prod cumsum cumprod logcumsumexp logsumexp norm linalg_vector_norm dist _cdist_forward _pdist_forward renorm "
    "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "grid_sampler_2d grid_sampler_3d"
)
# Results easily leave the range of float16, 6e-8 to 65504. (PyTorch's autocast for CUDA, whose default is float16, computes them in float32.)
DENY_FLOAT16 = packets("pow square sum var var_mean reciprocal rsqrt")

# Arguments that stay float32 while the operator's other arguments are cast to half. Masks hold -inf and biases; parameters of norms are small.
_NORM = ("weight", "bias", "running_mean", "running_var")
_READ_AS_WRITTEN: Mapping[OpOverloadPacket, tuple[str, ...]] = {
    aten.native_layer_norm: _NORM,
    aten.native_group_norm: _NORM,
    aten._native_batch_norm_legit_no_training: _NORM,
    aten._scaled_dot_product_flash_attention_for_cpu: ("attn_mask",),
}


def is_on(node: Node, packets: Iterable[object]) -> bool:
    """True if the node calls an operator of one of the packets."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in packets


def is_layer(node: Node) -> bool:
    """True if the operator is a layer in reports: a product, a convolution or an attention."""
    return is_on(node, ALLOW)


def is_clear(node: Node) -> bool:
    """True if the operator counts as CLEAR: it is on the list, a view, or a getitem."""
    return is_item(node) or is_view(node) or is_on(node, CLEAR)


def is_denied(node: Node, dtype: torch.dtype) -> bool:
    """True if the operator is on DENY for `dtype`. A square written as a product counts as a square."""
    if is_on(node, DENY):
        return True
    squares = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return dtype == torch.float16 and (squares or is_on(node, DENY_FLOAT16))


def reads_form(node: Node) -> bool:
    """True if the operator reads no values, so that their dtype does not matter: sizes, and fills with a dtype argument."""
    return is_on(node, _FORMS) or (is_on(node, _FILLS) and node.kwargs.get("dtype") is not None)


def read_as_written(node: Node) -> set[Node]:
    """The arguments that are not cast when the operator is converted."""
    if not isinstance(node.target, OpOverload):
        return set()
    names = _READ_AS_WRITTEN.get(node.target.overloadpacket, ())
    arguments = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    named = {value for name, value in arguments.items() if name in names and isinstance(value, Node)}
    others = [value for name, value in arguments.items() if name not in names]
    return named - {value for value in tree_leaves(others) if isinstance(value, Node)}
