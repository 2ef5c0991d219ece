"""FlexAttention beside eager: functions of scores and masks, captured tensors, grouped heads, rows that see nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import torch_hybrid_backend

Mask = Callable[..., torch.Tensor]
_BIAS = torch.randn(4, generator=torch.Generator().manual_seed(0))
_DOCUMENTS = torch.arange(3).repeat_interleave(30)


def _causal(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _window(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs() < 7


def _document(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return (_DOCUMENTS[q] == _DOCUMENTS[k]) & (q >= k)


def _late(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return k > q + 40  # the last queries see nothing


def _alibi(score: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + _BIAS[h] * (k - q)


def _capped(score: Any, _b: Any, _h: Any, _q: Any, _k: Any) -> Any:
    return 5 * torch.tanh(score / 5)


CASES = [
    pytest.param(None, None, id="plain"),
    pytest.param(None, _causal, id="causal"),
    pytest.param(_alibi, _causal, id="alibi"),
    pytest.param(_capped, _window, id="capped"),
    pytest.param(None, _document, id="documents"),
    pytest.param(_alibi, _late, id="nothing seen"),
]


def _operands(keys: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, heads, 90, 16, dtype=dtype) for heads in (4, keys, keys)]


def _attention(score_mod: Any, mask: Any, **settings: Any) -> Callable[..., Any]:
    block_mask = None if mask is None else create_block_mask(mask, None, None, 90, 90, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, score_mod, block_mask, **settings)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("score_mod", "mask"), CASES)
def test_attention(score_mod: Any, mask: Any) -> None:
    """Results are those of eager in float64."""
    torch.compiler.reset()
    attention, operands = _attention(score_mod, mask), _operands()
    with torch.no_grad():
        exact = attention(*(x.double() for x in operands))
        result = torch.compile(attention, backend="hybrid")(*operands)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels() -> None:
    """Scores are in no memory: products, function, mask and softmax are one kernel."""
    torch.compiler.reset()
    with torch.no_grad():
        text = str(torch_hybrid_backend.explain(_attention(_alibi, _causal), *_operands()))
    assert "kernels: attention" in text


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_forms() -> None:
    """Grouped heads, one batch of keys for all, log-sum-exps of rows, half types."""
    for dtype, keys, settings in (
        (torch.float32, 2, {"enable_gqa": True, "scale": 0.3}),
        (torch.bfloat16, 4, {}),
        (torch.float32, 4, {"return_aux": AuxRequest(lse=True)}),
    ):
        torch.compiler.reset()
        attention, operands = _attention(_alibi, _late, **settings), _operands(keys, dtype)
        with torch.no_grad():
            expected, found = attention(*operands), torch.compile(attention, backend="hybrid")(*operands)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for a, b in zip(_tensors(found), _tensors(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_gradients_on() -> None:
    """Compiled as well where gradients are on and nothing needs one. (On the CPU it has no backward.)"""
    torch.compiler.reset()
    attention, operands = _attention(_alibi, _causal), _operands()
    assert "kernels: attention" in str(torch_hybrid_backend.explain(attention, *operands))


def _tensors(found: Any) -> list[torch.Tensor]:
    """The result, and the log-sum-exps if they were asked for."""
    return [found] if isinstance(found, torch.Tensor) else [found[0], found[1].lse]
