"""sentence-transformers: its kinds of models on small encoders with random weights, and the real MiniLM."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from benchmarks.models import minilm_directory
from tests.ecosystem import tiny_models
from tests.ecosystem.case import Case, Inputs
from tests.ecosystem.libraries import load


def _encoder(head: str = "") -> Any:
    """The library's wrapper of a BERT of six layers, kept on disk for as long as it takes to read it."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=tiny_models.VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=128,
        num_labels=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, head or "BertModel")(config).save_pretrained(folder)
        tiny_models.tokenizer().save_pretrained(folder)
        if head == "BertForSequenceClassification":
            return load("sentence_transformers").CrossEncoder(folder, device="cpu", local_files_only=True)
        if head == "BertForMaskedLM":
            return load("sentence_transformers.sparse_encoder.models").MLMTransformer(folder)
        return load("sentence_transformers.models").Transformer(folder)


def _dense() -> nn.Module:
    """Mean and largest of the tokens, a projection, length one."""
    models = load("sentence_transformers.models")
    encoder = _encoder()
    width = encoder.get_embedding_dimension()
    parts = [
        encoder,
        models.Pooling(width, pooling_mode=("mean", "max")),
        models.Dense(2 * width, 256),
        models.Normalize(),
    ]
    model: nn.Module = load("sentence_transformers").SentenceTransformer(modules=parts, device="cpu")
    return model


def _minilm() -> nn.Module:
    model: nn.Module = load("sentence_transformers").SentenceTransformer(
        str(minilm_directory()), device="cpu", local_files_only=True
    )
    return model


def _sparse() -> nn.Module:
    """SPLADE: the largest logarithm of each word's logits."""
    models = load("sentence_transformers.sparse_encoder.models")
    parts = [_encoder("BertForMaskedLM"), models.SpladePooling(pooling_strategy="max")]
    model: nn.Module = load("sentence_transformers").SparseEncoder(modules=parts, device="cpu")
    return model


def _static() -> nn.Module:
    """Averages of rows of a table, no encoder at all."""
    tokenizer = tiny_models.tokenizer().backend_tokenizer
    table = load("sentence_transformers.models").StaticEmbedding(tokenizer, embedding_dim=256)
    model: nn.Module = load("sentence_transformers").SentenceTransformer(modules=[table], device="cpu")
    return model


def _features(vocabulary: int = tiny_models.VOCABULARY) -> Inputs:
    """Four tokenised texts of different lengths."""
    length = int(torch.randint(24, 40, ()))
    numbers = torch.randint(5, vocabulary, (4, length))
    mask = (torch.arange(length) < torch.randint(10, length, (4, 1))).long()
    mask[0] = 1
    return ({"input_ids": numbers, "attention_mask": mask, "token_type_ids": torch.zeros_like(numbers)},)


def _bag() -> Inputs:
    """Four texts, one after the other, and where each begins."""
    lengths = torch.randint(10, 40, (4,))
    numbers = torch.randint(5, tiny_models.VOCABULARY, (int(lengths.sum()),))
    return ({"input_ids": numbers, "offsets": lengths.cumsum(0) - lengths},)


# None is quick: test_sentence_transformers.py has one of these models in every run of the tests.
CASES = (
    Case("sentence_transformers/dense", _dense, _features),
    Case("sentence_transformers/minilm", _minilm, lambda: _features(30000), keep_weights=True),
    Case("sentence_transformers/sparse", _sparse, _features),
    Case(
        "sentence_transformers/cross_encoder",
        lambda: _encoder("BertForSequenceClassification").model,
        lambda: _features()[0],
    ),
    Case(
        "sentence_transformers/static",
        _static,
        _bag,
        reason="A single look-up, which runs in eager; Dynamo's guards are the rest, and its backend `eager` takes as long",
    ),
)
