"""Coding of segments of weights: the encoding "huffman" of docs/hybrid_format.md, which csrc/src/coded_segment.cc decodes.

A block of bytes is taken as numbers of 1, 2, 4 or 8 bytes, and each distinct number gets a word of bits, the shorter the more often it occurs.
Weights of `compress` are so: few values, shared by many, and zeros. Other weights are not: their segments stay as they are, and processes that
open the file share them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torch_hybrid_backend.compression.code_lengths import code_lengths
from torch_hybrid_backend.runtime.native.ops import huffman_encode

BLOCK_BYTES = 1 << 18
# A segment is coded where it becomes no larger than this share: processes do not share what each of them decodes. Weights of 4 and 8 bits, and
# of half types, keep more.
_WORTHWHILE = 0.7
_WIDTHS = (8, 4, 2, 1)
_MOST_VALUES = 256
_LENGTHS_BYTES = 128
# Numbers that are looked at first: where they have too many values, the block has.
_FIRST = 2048

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _Code:
    """Code of a block: `symbols` stand for numbers of `width` bytes, which `values` has; of bytes, symbols are the bytes themselves."""

    width: int
    values: bytes
    symbols: Bytes
    counts: NDArray[np.int64]

    @property
    def least_bytes(self) -> float:
        """The bytes that it takes at least."""
        shares = self.counts[self.counts > 0] / len(self.symbols)
        entropy = -float(shares @ np.log2(shares))
        return 2 + len(self.values) + _LENGTHS_BYTES + max(entropy, 1.0) * len(self.symbols) / 8

    def written(self) -> bytes:
        """The block as it stands in a file."""
        lengths = np.array(code_lengths(self.counts.tolist()), dtype=np.uint8)
        coded = torch.empty((int(self.counts @ lengths) + 7) // 8, dtype=torch.uint8)
        huffman_encode(torch.from_numpy(self.symbols), torch.from_numpy(lengths), coded)
        head = struct.pack("<B", self.width)
        if self.width > 1:
            head += struct.pack("<B", len(self.values) // self.width - 1) + self.values
        return head + (lengths[::2] | lengths[1::2] << 4).tobytes() + coded.numpy().tobytes()


def coded(content: bytes, cuts: Sequence[int] = ()) -> bytes | None:
    """The segment coded; None where that is not worth it. `cuts`: where other numbers begin, in ascending order: blocks end there."""
    whole = np.frombuffer(bytearray(content), np.uint8)  # PyTorch wants memory that may be written to
    if not content:
        return None
    ends = [*cuts, len(content)]
    borders = [at for begin, end in zip([0, *cuts], ends, strict=True) for at in range(begin, end, BLOCK_BYTES)]
    blocks = [whole[begin:end] for begin, end in zip(borders, [*borders[1:], len(content)], strict=True)]
    codes = [_shortest(block) for block in blocks]
    least = sum(len(block) if code is None else code.least_bytes for block, code in zip(blocks, codes, strict=True))
    if least >= _WORTHWHILE * len(content):
        return None
    written = [
        b"\0" + block.tobytes() if code is None else code.written() for block, code in zip(blocks, codes, strict=True)
    ]
    sizes = [size for block, made in zip(blocks, written, strict=True) for size in (len(made), len(block))]
    made = struct.pack(f"<{1 + len(sizes)}I", len(blocks), *sizes) + b"".join(written)
    return made if len(made) <= _WORTHWHILE * len(content) else None


def _shortest(block: Bytes) -> _Code | None:
    """The code by which a block is shortest; None where it is not shorter than it was."""
    found = [code for width in _WIDTHS if (code := _code(block, width)) is not None]
    best = min(found, key=lambda code: code.least_bytes, default=None)
    return best if best is not None and best.least_bytes < len(block) else None


def _code(block: Bytes, width: int) -> _Code | None:
    if len(block) % width:
        return None
    numbers = block.view(f"<u{width}")
    if width == 1:
        return _Code(1, b"", block, np.bincount(block, minlength=_MOST_VALUES))
    if len(np.unique(numbers[:_FIRST])) > _MOST_VALUES:
        return None
    values, symbols, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    if len(values) > _MOST_VALUES:
        return None
    if len(values) == 1:  # a code has two words at least
        values, symbols, counts = np.repeat(values, 2), np.ones_like(symbols), np.array([0, len(symbols)])
    padded = np.pad(counts, (0, _MOST_VALUES - len(counts)))
    return _Code(width, values.tobytes(), symbols.astype(np.uint8).reshape(-1), padded)
