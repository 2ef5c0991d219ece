"""The lists of operators: nothing on two of them, and eager computes what may be converted in both half types."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.passes.precision import lists

aten = torch.ops.aten
_X = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)) + 0.5  # within the domain of every function
_ROWS, _SQUARE, _BATCH = _X[0, 0], _X[0, 1], _X[:, 0]
_INDEX = torch.zeros(2, dtype=torch.int64)
# Arguments of the operators that take more than one tensor of any shape.
_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "convolution": (_X, torch.rand(3, 4, 3, 3), torch.rand(3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "mm": (_ROWS, _SQUARE),
    "bmm": (_BATCH, _BATCH),
    "mv": (_ROWS, _ROWS[0]),
    "addmm": (_ROWS[0], _ROWS, _SQUARE),
    "addmv": (_ROWS[0], _ROWS, _ROWS[0]),
    "addbmm": (_ROWS, _BATCH, _BATCH),
    "baddbmm": (_BATCH, _BATCH, _BATCH),
    "linear": (_ROWS, _SQUARE, _ROWS[0]),
    "matmul": (_ROWS, _SQUARE),
    "scaled_dot_product_attention": (_X, _X, _X),
    "_scaled_dot_product_flash_attention_for_cpu": (_X, _X, _X),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "maximum", "minimum"), (_X, _X)),
    **dict.fromkeys(("addcmul", "addcdiv"), (_X, _X, _X)),
    "lerp": (_X, _X, 0.5),
    "pow": (_X, 3),
    "_prelu_kernel": (_X, torch.rand(1, 4, 1, 1)),
    "mean": (_X, [2, 3]),
    "var": (_X, [2, 3]),
    "var_mean": (_X, [2, 3]),
    "_softmax": (_X, -1, False),
    "_log_softmax": (_X, -1, False),
    "native_layer_norm": (_X, [6], torch.rand(6), torch.rand(6), 1e-5),
    "native_group_norm": (_X, torch.rand(4), torch.rand(4), 2, 4, 36, 2, 1e-5),
    "_native_batch_norm_legit_no_training": (_X, *torch.rand(4, 4), 0.1, 1e-5),
    "avg_pool2d": (_X, [2, 2]),
    "_adaptive_avg_pool2d": (_X, [2, 3]),
    "upsample_linear1d": (_BATCH, [12], False),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d"), (_X, [12, 12], False)),
    **dict.fromkeys(("upsample_nearest1d", "_upsample_nearest_exact1d"), (_BATCH, [12])),
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), (_X, [12, 12])),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), (_X, 0.75)),
    "max_pool2d_with_indices": (_X, [2, 2]),
    **dict.fromkeys(("cat", "stack"), ([_X, _X],)),
    "constant_pad_nd": (_X, [1, 1]),
    "gather": (_X, 0, torch.zeros_like(_X, dtype=torch.int64)),
    "index_select": (_X, 0, _INDEX),
    "index": (_X, [_INDEX]),
    "flip": (_X, [0]),
    "roll": (_X, [1], [2]),
    "repeat": (_X, [2, 1, 1, 1]),
    "where": (_X > 0.7, _X, _X),
    "masked_fill": (_X, _X > 0.7, 0.0),
    "pixel_shuffle": (_X, 2),
    "pixel_unshuffle": (_X, 2),
    "im2col": (_X, [2, 2], [1, 1], [0, 0], [1, 1]),
    "slice_scatter": (_X, _X[:1], 0, 0, 1),
    "select_scatter": (_X, _X[0], 0, 0),
    "full_like": (_X, 2.0),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), (_X, [3])),
    "new_full": (_X, [3], 2.0),
}


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def test_no_operator_is_on_two_lists() -> None:
    """An operator's treatment does not depend on an order; only float16 denies what else infers."""
    everything = [*lists.ALLOW, *lists.INFER, *lists.CLEAR, *lists.DENY]
    assert len(everything) == len(set(everything)) > 100
    assert lists.DENY_FLOAT16 <= lists.INFER


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eager_computes_what_may_be_converted(dtype: torch.dtype) -> None:
    """Every operator that may be converted has a kernel in PyTorch for half values, with results of their dtype near those of float32."""
    for packet in lists.ALLOW | lists.INFER | lists.CLEAR:
        name = packet.__name__
        arguments = _ARGUMENTS.get(name, (_X,))
        expected, result = packet(*arguments), packet(*(_cast(value, dtype) for value in arguments))
        if isinstance(expected, tuple):
            expected, result = expected[0], result[0]
        assert result.dtype == dtype, name
        if "empty" in name:
            continue  # it has no values
        torch.testing.assert_close(result.float(), expected, rtol=0.03, atol=0.03, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_read_as_written_may_be() -> None:
    """Norms and attention take half values beside parameters and masks of float32, which stay so."""
    half = _X.bfloat16()
    norms = {name: _ARGUMENTS[name] for name in ("native_layer_norm", "native_group_norm")}
    norms["_native_batch_norm_legit_no_training"] = _ARGUMENTS["_native_batch_norm_legit_no_training"]
    for name, (_, *others) in norms.items():
        assert getattr(aten, name)(half, *others)[0].dtype == torch.bfloat16
    mask = torch.full((2, 1, 6, 6), -3.4e38).triu(1)  # bfloat16 has no such number but -inf
    attention = aten._scaled_dot_product_flash_attention_for_cpu(half, half, half, attn_mask=mask)
    assert attention[0].dtype == torch.bfloat16
