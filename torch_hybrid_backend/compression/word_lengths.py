"""Words of a Huffman code: the best ones of limited length, from how often each symbol occurs.

Source: the package-merge algorithm, Larmore & Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 1990.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

LONGEST = 12  # bits; csrc/include/huffman.h says why


def word_lengths(counts: Sequence[int]) -> list[int]:
    """The bits of each symbol's word, 0 for symbols that do not occur; for at most 2 ** LONGEST symbols, one of which occurs.

    A code is complete: every sequence of bits begins with a word. A symbol that is alone therefore shares it with another one.
    """
    lengths = [0] * len(counts)
    singles = sorted(((count, (symbol,)) for symbol, count in enumerate(counts) if count), key=itemgetter(0))
    if len(singles) == 1:
        symbol = singles[0][1][0]
        lengths[symbol] = lengths[symbol - 1] = 1
        return lengths
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(LONGEST):
        merged = sorted(singles + packages, key=itemgetter(0))
        packages = [(a + b, x + y) for (a, x), (b, y) in zip(merged[::2], merged[1::2], strict=False)]
    for _, symbols in packages[: len(singles) - 1]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths
