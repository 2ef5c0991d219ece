"""Tiny transformers models with random weights and a tokenizer built on the spot: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.weights import randomise

_WORDS = """the cat sat on a mat and looked at dog while rain fell over old town where people sold bread coffee books
their children played until evening came home again with stories about ships storms distant islands""".split()
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = len(_SPECIAL) + len(_WORDS)
TEXTS = ("the cat sat on the mat", "rain fell over the old town while children played", "coffee and books")


def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Words of a small vocabulary, padding on the left as text generation wants it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: number for number, word in enumerate((*_SPECIAL, *_WORDS))}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]", "bos_token": "[CLS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **named)


def _made(model: torch.nn.Module) -> Any:
    randomise(model, (torch.randint(5, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0)),))
    return model.eval()


_GENERATION = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}


def gpt2() -> Any:
    """Two layers, learned positions, one matrix product for query, key and value."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=96, **_GENERATION
    )
    return _made(transformers.GPT2LMHeadModel(config))


def llama() -> Any:
    """Two layers, rotary positions, fewer heads for keys than for queries."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        **_GENERATION,
    )
    return _made(transformers.LlamaForCausalLM(config))


def _bert_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }


def encoder() -> Any:
    """BERT of two layers."""
    return _made(transformers.BertModel(transformers.BertConfig(**_bert_settings())))


def classifier() -> Any:
    """BERT of two layers with three labels."""
    return _made(transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **_bert_settings())))
