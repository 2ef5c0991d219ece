"""Multi-head attention with its projections in sight: torch's results, call by call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.quantization.attention import arguments_of, is_taken, multi_head_attention

_WIDTH, _HEADS = 12, 3


def _call(module: nn.MultiheadAttention, *inputs: torch.Tensor, **masks: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the module calls the function."""
    positional = (
        *(*inputs, module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias, module.bias_k),
        *(module.bias_v, module.add_zero_attn, 0.0, module.out_proj.weight, module.out_proj.bias),
    )
    own = {f"{name}_proj_weight": getattr(module, f"{name}_proj_weight") for name in "qkv"}
    return positional, {"use_separate_proj_weight": not module._qkv_same_embed_dim, **own, "training": False, **masks}


def _projections(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Compares the results with torch's; the projections that were computed, in order."""
    given, seen = arguments_of(args, kwargs), list[str]()
    assert is_taken(given)

    def project(part: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(part)
        return functional.linear(x, w, bias)

    found, expected = multi_head_attention(project, given), functional.multi_head_attention_forward(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    return seen


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("batched", [True, False])
def test_results_are_torchs(batched: bool) -> None:
    """With masks of numbers or truth values, for all heads or for each, of padding; with weights, averaged or not; where nothing is seen."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(_WIDTH, _HEADS, dtype=torch.float64)
    nn.init.normal_(module.in_proj_bias)
    batch = 2 if batched else 1
    x, y = (torch.randn(*((n, 2) if batched else (n,)), _WIDTH, dtype=torch.float64) for n in (5, 7))
    seen = torch.rand(5, 7) > 0.6
    seen[0] = True
    masks = [None, seen, torch.randn(5, 7, dtype=torch.float64), torch.rand(batch * _HEADS, 5, 7) > 0.6]
    padding = torch.tensor([[False] * 5 + [True] * 2] * batch)
    paddings = [None, padding if batched else padding[0]]
    for mask, of_keys, weights in itertools.product(masks, paddings, (False, True)):
        how = {"attn_mask": mask, "key_padding_mask": of_keys, "need_weights": weights, "average_attn_weights": batched}
        assert _projections(*_call(module, x, y, y, **how)) == ["in_proj", "in_proj", "out_proj"]
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    for weights in (False, True):
        how = {"attn_mask": causal, "is_causal": True, "need_weights": weights}
        assert _projections(*_call(module, x, x, x, **how)) == ["in_proj", "out_proj"]
    assert _projections(*_call(module, x, y, y.clone())) == ["in_proj"] * 3 + ["out_proj"]


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_their_own(bias: bool) -> None:
    """Keys and values of other widths than queries; no biases."""
    module = nn.MultiheadAttention(_WIDTH, _HEADS, bias=bias, kdim=8, vdim=4, dtype=torch.float64)
    q, k, v = (torch.randn(n, 2, width, dtype=torch.float64) for n, width in ((5, _WIDTH), (7, 8), (7, 4)))
    assert _projections(*_call(module, q, k, v)) == ["in_proj"] * 3 + ["out_proj"]
    same = nn.MultiheadAttention(_WIDTH, _HEADS, bias=bias, dtype=torch.float64)
    for inputs in ((q, q, q), (q, q.sin(), q.cos())):
        _projections(*_call(same, *inputs))


def test_rare_calls_and_bad_ones_are_torchs_own() -> None:
    """Keys that are added, keys that were projected already, dropout, and all that torch refuses."""
    plain, x = nn.MultiheadAttention(_WIDTH, _HEADS), torch.randn(5, 2, _WIDTH)
    rare = [
        nn.MultiheadAttention(_WIDTH, _HEADS, add_bias_kv=True),
        nn.MultiheadAttention(_WIDTH, _HEADS, add_zero_attn=True),
    ]
    assert not any(is_taken(arguments_of(*_call(module, x, x, x))) for module in rare)
    bad: list[dict[str, Any]] = [
        {"static_k": torch.randn(6, 5, 4)},
        {"training": True, "dropout_p": 0.5},
        {"attn_mask": torch.zeros(4, 5)},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)},
        {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
        {"is_causal": True},
        {"embed_dim_to_check": _WIDTH + 1},
        {"num_heads": 5},
        {"key": torch.randn(4, 2, _WIDTH)},
        {"query": torch.randn(_WIDTH)},
    ]
    given = arguments_of(*_call(plain, x, x, x))
    assert is_taken(given)
    for change in bad:
        assert not is_taken({**given, **change}), change
