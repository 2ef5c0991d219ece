"""The fast path of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` is captured as operators that engines know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

_X = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(0))
_PADDING = torch.arange(7)[None] >= torch.tensor([7, 4, 1])[:, None]
_NOTHING_LEFT = _PADDING | (torch.arange(3) == 1)[:, None]
_CAUSAL = torch.ones(7, 7).triu(1).bool()


def _same(recorder, module, *inputs, **masks):
    module.eval()
    with torch.no_grad():
        actual, expected = recorder.compile(module)(*inputs, **masks), module(*inputs, **masks)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_stride=True, equal_nan=True)
    assert not {"aten._transformer_encoder_layer_fwd.default", "aten._native_multi_head_attention.default"} & set(
        recorder.operators()
    )


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"src_mask": _CAUSAL},
        {"src_key_padding_mask": _PADDING},
        {"src_mask": _CAUSAL, "src_key_padding_mask": _PADDING},
        {"src_key_padding_mask": _NOTHING_LEFT},
    ],
    ids=["none", "causal", "padding", "both", "all of one"],
)
def test_encoder_layer(recorder, norm_first, activation, masks):
    """Every kind of mask; where all keys of a query are masked the result is not a number, as in eager."""
    layer = nn.TransformerEncoderLayer(24, 4, 40, activation=activation, norm_first=norm_first, batch_first=True)
    _same(recorder, layer, _X, **masks)


class _ToItself(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor, **masks: torch.Tensor) -> object:
        return self.attention(x, x, x, **self.options, **masks)


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=["average", "no weights", "heads"]
)
@pytest.mark.parametrize("masks", [{}, {"key_padding_mask": _PADDING}], ids=["none", "padding"])
def test_attention(recorder, options, masks):
    """Self-attention with and without its weights."""
    _same(recorder, _ToItself(**options), _X, **masks)


@pytest.mark.parametrize("shape", [(0, 7, 24), (3, 0, 24)])
def test_empty_inputs(recorder, shape):
    """No sample, and no position."""
    x = torch.randn(shape)
    for module in (
        nn.TransformerEncoderLayer(24, 4, 40, batch_first=True).eval(),
        _ToItself(need_weights=False).eval(),
    ):
        with torch.no_grad():
            torch.testing.assert_close(recorder.compile(module)(x), module(x))
