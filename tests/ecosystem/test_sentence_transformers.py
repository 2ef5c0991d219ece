"""sentence-transformers: the real MiniLM encoder, its forward compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.models import minilm_directory

_SENTENCES = (
    "A ferry crosses the strait every forty minutes in summer.",
    "How often does the boat to the island leave?",
    "She tuned the piano by ear.",
    "Caches and vector units decide how fast a matrix product runs, and the order in which memory is read matters just as much.",
)


@pytest.fixture(scope="module")
def encoder() -> Any:
    """all-MiniLM-L6-v2 with the weights of its package."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(minilm_directory()), device="cpu", local_files_only=True)


def test_embeddings(encoder: Any) -> None:
    """Embeddings of a batch and of single sentences equal eager's; the nearest sentence is the one that means the same."""
    expected = encoder.encode(list(_SENTENCES), convert_to_tensor=True)
    encoder.compile(backend="hybrid")
    batch = encoder.encode(list(_SENTENCES), convert_to_tensor=True)
    torch.testing.assert_close(batch, expected, rtol=1e-3, atol=1e-4)
    for sentence, wanted in zip(_SENTENCES[:2], expected, strict=False):
        torch.testing.assert_close(encoder.encode(sentence, convert_to_tensor=True), wanted, rtol=1e-3, atol=1e-4)
    likeness = encoder.similarity(batch, batch).fill_diagonal_(-1)
    assert likeness[0].argmax() == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
