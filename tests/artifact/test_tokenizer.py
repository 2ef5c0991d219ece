"""Tokenizers of decoders: texts of tokens as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_hybrid_backend.artifact.tokenizer import open_tokenizer, token_texts
from torch_hybrid_backend.errors import ArgumentError

tokenizers = pytest.importorskip("tokenizers")


def test_texts_of_tokens(tmp_path: Path) -> None:
    """A letter of several bytes is shown with its last token; without a tokenizer, tokens are ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    text_of = token_texts(opened)
    assert [text_of(token) for token in opened.encode("aé").ids] == ["a", "", "é"]
    assert [token_texts(None)(token) for token in (3, 14)] == ["3 ", "14 "]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"is no tokenizer\.json that can be read"):
        open_tokenizer(tmp_path / "none.json")
