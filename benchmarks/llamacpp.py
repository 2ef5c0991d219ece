"""A Llama of transformers by llama.cpp: its weights in a GGUF file, its linear layers in llama.cpp's blocks of 32, a token a call.

`make .venv/llama_cpp` builds llama.cpp for this machine, in a folder apart (minutes; needs a C++ compiler).

Source: ggml-org, "GGUF" and "llama.h", 2026 (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(sys.prefix) / "llama_cpp"
# Its blocks -> bytes of a weight: 32 weights and a scale in float16.
BYTES = {"Q8_0": 34 / 32, "Q4_0": 18 / 32}


class LlamaCpp:
    """Input ids (1, tokens) -> logits (1, vocabulary) of the last token, in float32; each call moves on by its tokens.

    kind: how linear layers keep their weights (`BYTES`). The cache has room for `positions`, of which `prompt` (1, tokens) takes the first.
    Raises ModuleNotFoundError where llama.cpp is not built, RuntimeError where it refuses the model.
    """

    def __init__(self, model: nn.Module, kind: str, positions: int, prompt: torch.Tensor) -> None:
        self._library = _llama_cpp()
        self._vocabulary = model.config.vocab_size
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, kind, path)
            parameters = self._library.llama_model_default_params()
            parameters.use_mmap = False  # what is repacked for this processor is so while it is read
            self._model = self._library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError("llama.cpp did not load the model's file; its log above says why")
        settings = self._library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = positions
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = self._library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp made no context for the model; its log above says why")
        self._prompt = prompt.shape[1]
        self(prompt)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = (ctypes.c_int32 * ids.shape[1])(*ids[0].tolist())
        # A batch without positions goes on behind the cache's last one, and computes logits of its last token alone.
        status = self._library.llama_decode(self._context, self._library.llama_batch_get_one(tokens, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode returned {status} (1: the cache is full)")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocabulary)).contents
        return torch.frombuffer(values, dtype=torch.float32).clone()[None]

    def rewind(self) -> None:
        """Back to behind the prompt."""
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_seq_rm(memory, 0, self._prompt, -1)


def write_gguf(model: nn.Module, kind: str, path: Path) -> None:
    """A LlamaForCausalLM without biases as a GGUF file without a vocabulary. Embedding and norms stay float32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    blocks = gguf.GGMLQuantizationType[kind]

    def add(name: str, weight: torch.Tensor, *, heads: int = 0) -> None:
        values = weight.detach().float()
        if heads:
            values = _rotated_in_pairs(values, heads)
        if name.startswith("token_embd") or "norm" in name:
            writer.add_tensor(f"{name}.weight", values.numpy())
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values.numpy(), blocks), raw_dtype=blocks)

    add("token_embd", model.model.embed_tokens.weight)
    add("output_norm", model.model.norm.weight)
    add("output", model.lm_head.weight)
    for number, layer in enumerate(model.model.layers):
        attention, feed_forward = layer.self_attn, layer.mlp
        add(f"blk.{number}.attn_norm", layer.input_layernorm.weight)
        add(f"blk.{number}.attn_q", attention.q_proj.weight, heads=config.num_attention_heads)
        add(f"blk.{number}.attn_k", attention.k_proj.weight, heads=config.num_key_value_heads)
        add(f"blk.{number}.attn_v", attention.v_proj.weight)
        add(f"blk.{number}.attn_output", attention.o_proj.weight)
        add(f"blk.{number}.ffn_norm", layer.post_attention_layernorm.weight)
        add(f"blk.{number}.ffn_gate", feed_forward.gate_proj.weight)
        add(f"blk.{number}.ffn_up", feed_forward.up_proj.weight)
        add(f"blk.{number}.ffn_down", feed_forward.down_proj.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotated_in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """transformers turns element i of a head with the one half a head behind it, llama.cpp neighbours: these rows are put together."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def _llama_cpp() -> Any:
    """The library's own functions (`llama.h`)."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        from llama_cpp import llama_cpp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"llama.cpp is not built: run `make .venv/llama_cpp` ({error})") from error
    return llama_cpp
