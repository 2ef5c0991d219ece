"""Attention that a model writes out, beside `scaled_dot_product_attention` and beside inductor, in turn in one process.

    python -m benchmarks.sdpa_matching [--seconds 2]

Microseconds of a call: the median of the rounds, guards included. Batch, heads, queries, keys, width of a head.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from torch_hybrid_backend.measuring.measure import measure

_Shape = tuple[int, int, int, int, int]
_CASES: tuple[tuple[str, _Shape, torch.dtype, bool], ...] = (
    ("BERT-base, 128 tokens", (1, 12, 128, 128, 64), torch.float32, False),
    ("BERT-base, 512 tokens", (1, 12, 512, 512, 64), torch.float32, False),
    ("GPT-2, 256 tokens, causal", (1, 12, 256, 256, 64), torch.float32, True),
    ("ViT-B/16, batch 8", (8, 12, 197, 197, 64), torch.float32, False),
    ("Swin's windows", (64, 3, 49, 49, 32), torch.float32, False),
    ("heads of 160", (1, 8, 256, 256, 160), torch.float32, False),
    ("2,048 tokens, heads of 40", (1, 8, 2048, 2048, 40), torch.float32, False),
    ("one token, 1,024 in the cache", (1, 16, 1, 1024, 64), torch.float32, False),
    ("one token, 1,024 in the cache", (1, 16, 1, 1024, 64), torch.bfloat16, False),
    ("1,024 tokens, heads of 128", (1, 8, 1024, 1024, 128), torch.bfloat16, False),
)


def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _times(shape: _Shape, dtype: torch.dtype, causal: bool, seconds: float) -> list[float]:
    batch, heads, queries, keys, width = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, rows, width).to(dtype) for rows in (queries, keys, keys))
    calls: list[Callable[[], object]] = []
    for backend, fn in (("hybrid", written), ("hybrid", fused), ("inductor", written)):
        compiled = torch.compile(partial(fn, causal=causal), backend=backend, dynamic=False)
        calls.append(partial(compiled, q, k, v))
        for _ in range(2):
            calls[-1]()
    return [timing.median_us for timing in measure(calls, seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    seconds = parser.parse_args().seconds
    print(f"{'':46} {'written':>9} {'sdpa':>9} {'inductor':>9}")
    with torch.no_grad():
        for name, shape, dtype, causal in _CASES:
            torch.compiler.reset()
            times = _times(shape, dtype, causal, seconds)
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            print(f"{label:46} " + " ".join(f"{us:9.1f}" for us in times), flush=True)


if __name__ == "__main__":
    main()
