"""transformers: kinds of models that the zoo has not, a few layers of each at a fraction of the published widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import Case, Inputs

_VOCABULARY = 512
# Nothing ends early: every run generates as many tokens.
_SPECIAL = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def _model(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """The transformers class `name` on its configuration."""

    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
        return model

    return make


def _tokens(batch: int, length: int, **others: Any) -> Callable[[], Inputs]:
    """Token numbers without special ones, all attended to, and `others` as they are."""

    def example() -> Inputs:
        numbers = torch.randint(5, _VOCABULARY, (batch, length))
        return {"input_ids": numbers, "attention_mask": torch.ones_like(numbers), **others}

    return example


def _generate(tokens: int, **others: Any) -> Mapping[str, Any]:
    """Greedy, with the logits of every step, so that not only the choices are compared."""
    return {
        "do_sample": False,
        "min_new_tokens": tokens,
        "max_new_tokens": tokens,
        "return_dict_in_generate": True,
        "output_logits": True,
        **others,
    }


def _generation(
    name: str, make: Callable[[], nn.Module], example: Callable[[], Inputs], tokens: int = 10, **others: Any
) -> Case:
    """`generate` around a compiled forward; `others`: its settings, and those of the case."""
    of_case = {key: others.pop(key) for key in ("keep_weights", "quick", "reason", "faults") if key in others}

    def inputs() -> Inputs:
        drawn = example()
        assert isinstance(drawn, dict)
        return {**drawn, **_generate(tokens, **others)}

    # A prompt's cache is an argument that torch.export does not know: `export_generation` has it in buffers.
    return Case(
        name, make, inputs, part="forward", method="generate", not_exported="transformers.cache_utils", **of_case
    )


_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **_SPECIAL,
}
_EXPERTS = {**_DECODER, "num_hidden_layers": 4, "moe_intermediate_size": 192}
_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "image_size": 64,
    "patch_size": 8,
}
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    **_SPECIAL,
    "eos_token_id": 2,
}
_WAVES = {
    "vocab_size": 32,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "conv_dim": (128,) * 7,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


def _waves(samples: int) -> Callable[[], Inputs]:
    return lambda: {"input_values": torch.randn(1, samples)}


def _pictures_and_text(side: int, words: int) -> Callable[[], Inputs]:
    """A picture and two texts, which end with the token 2."""

    def example() -> Inputs:
        numbers = torch.randint(5, _VOCABULARY, (2, words))
        numbers[:, -1] = 2
        return {
            "input_ids": numbers,
            "attention_mask": torch.ones_like(numbers),
            "pixel_values": torch.randn(1, 3, side, side),
        }

    return example


def _by_modality(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return _model(name, config, text_config=dict(_TEXT), vision_config=dict(_VISION), **settings)


_WHISPER = _model(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    vocab_size=_VOCABULARY,
    num_mel_bins=40,
    d_model=192,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    max_source_positions=100,
    max_target_positions=64,
    decoder_start_token_id=3,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    **_SPECIAL,
)
_T5 = _model(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=_VOCABULARY,
    d_model=192,
    d_kv=32,
    d_ff=512,
    num_layers=3,
    num_heads=6,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=None,
    dropout_rate=0.0,
)
_BART = _model(
    "BartForConditionalGeneration",
    "BartConfig",
    vocab_size=_VOCABULARY,
    d_model=192,
    encoder_layers=3,
    decoder_layers=3,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    max_position_embeddings=128,
    decoder_start_token_id=3,
    forced_eos_token_id=None,
    **_SPECIAL,
)


def _llava() -> nn.Module:
    import transformers

    vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=192)
    text = transformers.LlamaConfig(**_DECODER)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=4)
    config.vision_feature_select_strategy = "default"
    return transformers.LlavaForConditionalGeneration(config)


def _llava_inputs() -> Inputs:
    """64 places for the picture's patches, then 12 words."""
    numbers = torch.randint(5, _VOCABULARY, (1, 76))
    numbers[:, :64] = 4
    return {
        "input_ids": numbers,
        "attention_mask": torch.ones_like(numbers),
        "pixel_values": torch.randn(1, 3, 64, 64),
    }


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_queries=20,
    )
    return transformers.DetrForObjectDetection(config)


_SPEECH = (
    Case("transformers/wav2vec2", _model("Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAVES), _waves(8000)),
    Case(
        "transformers/wavlm",
        _model("WavLMModel", "WavLMConfig", **{k: v for k, v in _WAVES.items() if k != "vocab_size"}),
        _waves(8000),
    ),
    Case(
        "transformers/audio_spectrogram",
        _model(
            "ASTForAudioClassification",
            "ASTConfig",
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            max_length=256,
            num_mel_bins=64,
        ),
        lambda: (torch.randn(1, 256, 64),),
    ),
    Case(
        "transformers/encodec",
        _model("EncodecModel", "EncodecConfig", num_filters=16, hidden_size=64, codebook_size=64, codebook_dim=64),
        lambda: {"input_values": torch.randn(1, 1, 4800)},
        keep_weights=True,
        reason="Graph breaks at each convolution, whose padding depends on data",
        not_exported="data-dependent expression",
    ),
    _generation("transformers/whisper_generate", _WHISPER, lambda: {"input_features": torch.randn(1, 40, 200)}),
)
_STATE_SPACE = (
    Case(
        "transformers/mamba",
        _model(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=_VOCABULARY,
            hidden_size=192,
            num_hidden_layers=3,
            state_size=16,
            use_cache=False,
        ),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 32))},
        keep_weights=True,
    ),
    Case(
        "transformers/mamba2",
        _model(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=_VOCABULARY,
            hidden_size=192,
            num_heads=12,
            head_dim=32,
            n_groups=1,
            num_hidden_layers=3,
            state_size=32,
            chunk_size=16,
            use_cache=False,
        ),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 64))},
        keep_weights=True,
    ),
    Case(
        "transformers/rwkv",
        _model(
            "RwkvForCausalLM",
            "RwkvConfig",
            vocab_size=_VOCABULARY,
            hidden_size=192,
            attention_hidden_size=192,
            num_hidden_layers=2,
            context_length=64,
            use_cache=False,
        ),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 16))},
        keep_weights=True,
    ),
    _generation(
        "transformers/mamba_generate",
        _model(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=_VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            state_size=16,
            **_SPECIAL,
        ),
        _tokens(1, 8),
        tokens=6,
        keep_weights=True,
    ),
    Case(
        "transformers/recurrent_gemma",
        _model(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            vocab_size=_VOCABULARY,
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=6,
            lru_width=192,
            attention_window_size=32,
            use_cache=False,
        ),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 24))},
        keep_weights=True,
    ),
)
_MIXTURES = (
    Case(
        "transformers/mixtral",
        _model("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4, use_cache=False),
        _tokens(2, 32),
    ),
    Case(
        "transformers/qwen3_moe",
        _model(
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_EXPERTS, num_experts=8, num_experts_per_tok=2, use_cache=False
        ),
        _tokens(2, 32),
    ),
    Case(
        "transformers/switch",
        _model(
            "SwitchTransformersEncoderModel",
            "SwitchTransformersConfig",
            vocab_size=_VOCABULARY,
            d_model=192,
            d_kv=32,
            d_ff=384,
            num_layers=4,
            num_sparse_encoder_layers=2,
            num_heads=6,
            num_experts=4,
            expert_capacity=16,
            router_jitter_noise=0.0,
        ),
        _tokens(2, 32),
        reason="Graph breaks at each expert, whose number of tokens depends on data",
        not_exported="Couldn't swap Linear.weight",  # it converts a layer in its forward
    ),
    _generation(
        "transformers/mixtral_generate",
        _model("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4),
        _tokens(1, 12),
        cache_implementation="static",
    ),
    Case(
        "transformers/deepseek_v3",
        _model(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **{**_EXPERTS, "num_key_value_heads": 6},
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=32,
            use_cache=False,
        ),
        _tokens(2, 32),
    ),
)
_VISION_LANGUAGE = (
    Case(
        "transformers/clip",
        _by_modality("CLIPModel", "CLIPConfig", projection_dim=64),
        _pictures_and_text(64, 16),
        quick=True,
    ),
    Case("transformers/siglip", _by_modality("SiglipModel", "SiglipConfig"), _pictures_and_text(64, 64)),
    Case(
        "transformers/blip",
        _by_modality("BlipForImageTextRetrieval", "BlipConfig"),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 16)), "pixel_values": torch.randn(1, 3, 64, 64)},
    ),
    Case("transformers/llava", _llava, _llava_inputs, not_exported="transformers.cache_utils"),
    _generation("transformers/llava_generate", _llava, _llava_inputs, tokens=6),
)
_VISION_ONLY = (
    Case("transformers/detr", _detr, lambda: {"pixel_values": torch.randn(1, 3, 128, 128)}),
    Case(
        "transformers/video_mae",
        _model(
            "VideoMAEForVideoClassification",
            "VideoMAEConfig",
            **{**_VISION, "patch_size": 16},
            num_frames=8,
            tubelet_size=2,
        ),
        lambda: {"pixel_values": torch.randn(1, 8, 3, 64, 64)},
    ),
    Case(
        "transformers/dpt_depth",
        _model(
            "DPTForDepthEstimation",
            "DPTConfig",
            **_VISION,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[32, 64, 128, 128],
            fusion_hidden_size=64,
        ),
        lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
    ),
)
_GENERATION = (
    _generation("transformers/t5_generate", _T5, _tokens(2, 16)),
    _generation("transformers/t5_generate_static", _T5, _tokens(2, 16), cache_implementation="static"),
    _generation("transformers/bart_beams", _BART, _tokens(1, 16), num_beams=3),
    _generation(
        "transformers/gemma3_generate",
        _model(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **_DECODER,
            head_dim=64,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 3,
        ),
        _tokens(1, 24),
    ),
    _generation(
        "transformers/qwen3_generate",
        _model("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=64),
        _tokens(2, 16),
    ),
)
_OTHERS = (
    Case(
        "transformers/deberta",
        _model(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **_ENCODER,
            relative_attention=True,
            position_buckets=32,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
        ),
        _tokens(2, 48),
    ),
    Case(
        "transformers/longformer",
        _model(
            "LongformerModel", "LongformerConfig", **{**_ENCODER, "num_hidden_layers": 3}, attention_window=[16] * 3
        ),
        lambda: {"input_ids": torch.randint(5, _VOCABULARY, (1, 64))},
        not_exported="data-dependent expression",
    ),
    Case(
        "transformers/modern_bert",
        _model(
            "ModernBertModel",
            "ModernBertConfig",
            **_ENCODER,
            local_attention=32,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        _tokens(2, 64),
    ),
    Case(
        "transformers/patch_time_series",
        _model(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            num_input_channels=4,
            context_length=128,
            patch_length=16,
            patch_stride=8,
            prediction_length=24,
            d_model=64,
            num_attention_heads=4,
            ffn_dim=128,
            num_hidden_layers=3,
        ),
        lambda: {"past_values": torch.randn(4, 128, 4)},
    ),
    Case(
        "transformers/bert_training",
        _model(
            "BertForSequenceClassification",
            "BertConfig",
            **_ENCODER,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        _tokens(4, 32),
        train=True,
    ),
    Case(
        "transformers/mixtral_training",
        _model(
            "MixtralForCausalLM",
            "MixtralConfig",
            **{**_DECODER, "num_hidden_layers": 2},
            num_local_experts=4,
            use_cache=False,
        ),
        _tokens(2, 32),
        reason="Grouped matrix products of the experts run in eager, forward and backward",
        train=True,
    ),
)
CASES: tuple[Case, ...] = (
    *_SPEECH,
    *_STATE_SPACE,
    *_MIXTURES,
    *_VISION_LANGUAGE,
    *_VISION_ONLY,
    *_GENERATION,
    *_OTHERS,
)
