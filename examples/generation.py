"""Generate text with a static cache: tokens per second, eager beside hybrid.

pip install transformers
python examples/generation.py                              # a Llama of 100 million parameters
python examples/generation.py --precision int4-weights     # weights in 4 bits: a token reads a seventh of the bytes
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1000}
MEDIUM = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16000}


def static_cache(config: LlamaConfig, positions: int) -> StaticCache:
    """Return a cache of fixed size with its memory already allocated, so that the first call is like every other."""
    cache = StaticCache(config=config, max_cache_len=positions)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
    return cache


def generate(model: LlamaForCausalLM, cache: StaticCache, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the prompt (1, length) with `tokens` more tokens behind it."""
    cache.reset()
    return model.generate(
        prompt, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def tokens_per_second(model: LlamaForCausalLM, cache: StaticCache, prompt: torch.Tensor, tokens: int) -> float:
    """Return the best of three generations."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        generate(model, cache, prompt, tokens)
        seconds.append(time.perf_counter() - start)
    return tokens / min(seconds)


@torch.no_grad()
def main() -> None:
    """Generate in eager, compile, and generate again."""
    parser = argparse.ArgumentParser(description="Generate text: tokens per second, eager beside hybrid.")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", default="as-written", help="see docs/precision.md")
    parser.add_argument("--small", action="store_true", help="a model that compiles in seconds")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    # With a network connection: AutoModelForCausalLM.from_pretrained(...), and its tokenizer for the prompt
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **(SMALL if arguments.small else MEDIUM))
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, config.vocab_size, (1, 16))
    cache = static_cache(config, positions=prompt.shape[1] + arguments.tokens)

    expected = generate(model, cache, prompt, arguments.tokens)
    eager = tokens_per_second(model, cache, prompt, arguments.tokens)
    # Errors grow from layer to layer in a network with random weights, far more than in a trained one: hence the tolerance.
    options = {"precision": arguments.precision, "precision_tolerance": 1.0}
    model.forward = torch.compile(model.forward, backend="hybrid", options=options)
    generated = generate(model, cache, prompt, arguments.tokens)  # compiles twice: for the prompt and for one token
    hybrid = tokens_per_second(model, cache, prompt, arguments.tokens)
    same = (generated == expected).sum().item() - prompt.shape[1]
    print(
        f"eager {eager:.1f} tokens/s, hybrid {hybrid:.1f} tokens/s: {hybrid / eager:.2f} times as fast; "
        f"{same} of {arguments.tokens} tokens are eager's"
    )


if __name__ == "__main__":
    main()
