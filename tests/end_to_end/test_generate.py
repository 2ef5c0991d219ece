"""transformers' `generate` in all its ways of decoding: the tokens are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def _models() -> tuple[Any, Any]:
    """A decoder, and one of its first layer alone, which guesses most of its tokens."""
    torch.manual_seed(0)
    made = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": layers})).eval()
        for layers in (2, 1)
    ]
    with torch.no_grad():  # logits far enough apart that rounding decides nothing
        for parameter in made[0].parameters():
            parameter.mul_(3)
    made[1].load_state_dict(made[0].state_dict(), strict=False)
    return made[0], made[1]


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "cache_implementation": "static"},
        {"num_beams": 3, "do_sample": True, "temperature": 1.3, "top_k": 20},
        {"assistant": True},
        {"assistant": True, "do_sample": True, "temperature": 0.9},
        {"prompt_lookup_num_tokens": 3},
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
        found: torch.Tensor = model.generate(prompt, max_new_tokens=10, **{"do_sample": False, **given})
        return found

    expected = tokens()
    options = {"placement": "estimate", "strict": True}
    for each in (model, assistant):
        each.forward = torch.compile(each.forward, backend="hybrid", options=options)
    for _ in range(2):
        assert torch.equal(tokens(), expected)
