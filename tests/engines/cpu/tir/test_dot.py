"""Words of operands, and their products, run."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.dot_products import MULTIPLICATION, DotProduct
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.dot import dot_product, load_neighbours, load_word, load_words

LANES = 4


def test_a_word_of_four_bytes_is_in_every_lane() -> None:
    """A word begins at any element; words of the right operand follow each other."""
    dot = DotProduct("vpdpbusd", 4, "uint8", "int8", "int32")

    def body(b: Builder, left: Any, right: Any, out: Any) -> Any:
        own = load_word(left, b.index(2), dot, LANES)
        words = load_words(right, b.index(4), dot, LANES)
        sums = dot_product(b, MULTIPLICATION, LANES, own, own, own)
        return b.seq(
            b.store_vector(out, 0, own, LANES),
            b.store_vector(out, LANES, words, 4 * LANES),
            b.store_vector(out, 20, sums, LANES),
        )

    left, right = torch.arange(8, dtype=torch.uint8), torch.arange(20, dtype=torch.int32)
    out = torch.zeros(24, dtype=torch.int32)
    run_body(body, left, right, out)
    word = int.from_bytes(bytes([2, 3, 4, 5]), "little")
    assert out[:4].tolist() == [word] * 4
    assert out[4:20].tolist() == list(range(4, 20))
    assert out[20:].tolist() == torch.tensor([word + word * word]).to(torch.int32).tolist() * 4


def test_neighbours_are_one_a_lane() -> None:
    """From any element on."""
    dot = DotProduct("sdot", 4, "int8", "int8", "int32")
    left, out = torch.arange(20, dtype=torch.int8), torch.zeros(4, dtype=torch.int32)
    run_body(lambda b, x, out: b.store_vector(out, 0, load_neighbours(x, b.index(2), dot, 4), 4), left, out)
    assert out.tolist() == left[2:18].clone().view(torch.int32).tolist()


def test_a_word_of_one_element_is_multiplied_as_it_is() -> None:
    """Without an instruction: total + left * right in every lane."""

    def body(b: Builder, left: Any, right: Any, out: Any) -> Any:
        total = b.load_vector(out, 0, LANES)
        own = load_word(left, b.index(1), MULTIPLICATION, LANES)
        sums = dot_product(b, MULTIPLICATION, LANES, total, own, load_words(right, b.index(0), MULTIPLICATION, LANES))
        return b.store_vector(out, 0, sums, LANES)

    out = torch.full((LANES,), 100, dtype=torch.int32)
    run_body(body, torch.tensor([5, 7], dtype=torch.int32), torch.arange(LANES, dtype=torch.int32), out)
    assert out.tolist() == [100, 107, 114, 121]
