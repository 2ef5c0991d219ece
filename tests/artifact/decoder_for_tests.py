"""A small decoder in a file, with its tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from tests.artifact.exported_for_tests import FAST


def exported_decoder(folder: Path) -> tuple[Path, Path]:
    """The file of a small Llama, and a tokenizer of letters and a few pairs."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat and the dog", "the dog and the cat"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        bos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    torch_hybrid_backend.export_generation(
        model, folder / "model.hybrid", max_length=32, prefill_length=8, options=FAST
    )
    return folder / "model.hybrid", folder / "tokenizer.json"
