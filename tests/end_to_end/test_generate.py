"""transformers' `generate` in all its ways of decoding: the tokens are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def _models() -> tuple[Any, Any]:
    """A decoder, and one of nearly its weights, which guesses most of its tokens."""
    torch.manual_seed(0)
    model, assistant = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval() for _ in range(2))
    with torch.no_grad():  # logits far enough apart that rounding decides nothing
        for weight, guess in zip(model.parameters(), assistant.parameters(), strict=True):
            weight.mul_(3)
            guess.copy_(weight + 0.02 * torch.randn_like(weight))
    return model, assistant


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "cache_implementation": "static"},
        # The others take many graphs, one for each number of tokens that is guessed.
        pytest.param({"num_beams": 3, "do_sample": True, "temperature": 1.3, "top_k": 20}, marks=pytest.mark.full),
        pytest.param({"assistant": True}, marks=pytest.mark.full),
        pytest.param({"assistant": True, "do_sample": True, "temperature": 0.9}, marks=pytest.mark.full),
        pytest.param({"prompt_lookup_num_tokens": 3}, marks=pytest.mark.full),
    ],
    ids=["beams", "beams in a static cache", "drawn beams", "speculative", "speculative, drawn", "prompt lookup"],
)
def test_tokens_are_eagers(given: dict[str, Any]) -> None:
    """Caches are reordered by beams, and cut where a guess was wrong, between calls of the compiled model."""
    torch.compiler.reset()
    model, assistant = _models()
    given = dict(given)
    given |= {"assistant_model": assistant} if given.pop("assistant", False) else {}
    prompt = torch.randint(1, 101, (1, 9))

    def tokens() -> torch.Tensor:
        torch.manual_seed(3)
        found: torch.Tensor = model.generate(prompt, max_new_tokens=8, **{"do_sample": False, **given})
        return found

    expected = tokens()
    options = {"placement": "estimate", "strict": True}
    for each in (model, assistant):
        each.forward = torch.compile(each.forward, backend="hybrid", options=options)
    for _ in range(2):
        assert torch.equal(tokens(), expected)
