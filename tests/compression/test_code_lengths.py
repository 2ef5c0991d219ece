"""Code lengths make complete codes, and the shortest ones."""

from __future__ import annotations

import heapq
import random
from fractions import Fraction

from torch_hybrid_backend.compression.code_lengths import LONGEST, code_lengths


def _huffman(counts: list[int]) -> tuple[int, int]:
    """Total bits, and the longest code word, of Huffman's code without a limit."""
    heap = [(count, 0) for count in counts if count]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        (a, below_a), (b, below_b) = heapq.heappop(heap), heapq.heappop(heap)
        total += a + b
        heapq.heappush(heap, (a + b, 1 + max(below_a, below_b)))
    return total, heap[0][1]


def test_codes_are_complete_and_as_short_as_huffmans() -> None:
    """The code is complete and within the limit. If Huffman's code is within the limit too, the totals are equal."""
    rng = random.Random(0)
    for number in range(150):
        skewed = number % 3 == 0
        counts = [int(2 ** rng.uniform(0, 30)) if skewed else rng.randint(0, 50) for _ in range(rng.randint(2, 256))]
        counts[0] += 1
        counts[1] += 1
        lengths = code_lengths(counts)
        assert sum(Fraction(1, 1 << length) for length in lengths if length) == 1
        assert max(lengths) <= LONGEST
        assert all((length > 0) == (count > 0) for length, count in zip(lengths, counts, strict=True))
        total = sum(length * count for length, count in zip(lengths, counts, strict=True))
        shortest, longest = _huffman(counts)
        assert total == shortest if longest <= LONGEST else total >= shortest


def test_a_symbol_alone_shares_the_code() -> None:
    """A symbol that occurs alone takes one bit; another symbol gets the other bit."""
    for symbol in (0, 7, 255):
        lengths = code_lengths([10 if k == symbol else 0 for k in range(256)])
        assert lengths[symbol] == 1
        assert sum(lengths) == 2


def test_limited_words_cost_little() -> None:
    """Counts that double with each symbol need code words of 39 bits. The limit makes the total 1% longer."""
    counts = [1 << k for k in range(40)]
    total = sum(length * count for length, count in zip(code_lengths(counts), counts, strict=True))
    shortest, _ = _huffman(counts)
    assert shortest < total <= 1.01 * shortest
