"""Code lengths of a Huffman code: the optimal lengths up to a limit, from the count of each symbol.

Source: the package-merge algorithm, Larmore & Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 1990.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

LONGEST = 12  # bits; csrc/include/huffman.h says why


def code_lengths(counts: Sequence[int]) -> list[int]:
    """The length of each symbol's code word in bits, 0 for symbols that do not occur. At least one of at most 2 ** LONGEST symbols occurs.

    The code is complete: every sequence of bits begins with a code word. So if only one symbol occurs, another symbol gets a code word too.
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
