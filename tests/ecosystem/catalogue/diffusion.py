"""diffusers: networks of image, video and audio diffusion, at a fraction of the published widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import Case, Inputs
from tests.ecosystem.libraries import load


def _model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(load("diffusers"), name)(**settings)
        return model

    return make


def _latents(channels: int, side: int, **others: tuple[int, ...]) -> Callable[[], Inputs]:
    """Two noisy latents at one time step each, and `others` by their shapes, standard normal."""

    def example() -> Inputs:
        drawn = {name: torch.randn(shape) for name, shape in others.items()}
        return {"sample": torch.randn(2, channels, side, side), "timestep": torch.randint(0, 1000, (2,)), **drawn}

    return example


def _image(side: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(1, 3, side, side),)


_CROSS = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
_UNET = {
    "sample_size": 32,
    "block_out_channels": (64, 128, 256),
    "down_block_types": _CROSS,
    "cross_attention_dim": 128,
    "attention_head_dim": 8,
}
_UNET_UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")}
_VAE_2 = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_VAE_4 = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


class TinyAutoencoder(nn.Module):
    """Encoder and decoder of AutoencoderTiny, without the bytes that its own forward puts between: a last bit would there become 1/255."""

    def __init__(self) -> None:
        super().__init__()
        self.autoencoder = load("diffusers").AutoencoderTiny()

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """picture: (b, 3, h, w).  Returns: the same shape."""
        latents = self.autoencoder.encode(picture).latents
        decoded: torch.Tensor = self.autoencoder.decode(latents).sample
        return decoded


class Controlled(nn.Module):
    """A UNet whose blocks get the residuals of a control net, as in a pipeline's step."""

    def __init__(self) -> None:
        super().__init__()
        diffusers = load("diffusers")
        self.unet = diffusers.UNet2DConditionModel(**_UNET, **_UNET_UP)
        self.control = diffusers.ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=(8, 16))

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor, hint: torch.Tensor
    ) -> torch.Tensor:
        """sample: (b, 4, h, w); hint: (b, 3, 2h, 2w).  Returns: the noise, (b, 4, h, w)."""
        down, middle = self.control(sample, timestep, encoder_hidden_states, hint, return_dict=False)
        noise: torch.Tensor = self.unet(
            sample,
            timestep,
            encoder_hidden_states,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            return_dict=False,
        )[0]
        return noise


class Denoising(nn.Module):
    """Four steps of a sampler around a UNet, with guidance: what a pipeline runs between text and picture."""

    def __init__(self) -> None:
        super().__init__()
        diffusers = load("diffusers")
        self.unet = diffusers.UNet2DConditionModel(**_UNET, **_UNET_UP)
        self.sampler = diffusers.DDIMScheduler()

    def forward(self, latents: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """latents: (b, 4, h, w); prompts: (2b, tokens, width), the empty ones first.  Returns: latents."""
        self.sampler.set_timesteps(4)
        for step in self.sampler.timesteps:
            both = self.unet(torch.cat([latents, latents]), step, encoder_hidden_states=prompts).sample
            without, towards = both.chunk(2)
            latents = self.sampler.step(without + 3.0 * (towards - without), step, latents).prev_sample
        return latents


def _flux() -> Inputs:
    """16x16 latent pixels and 32 words, with their positions."""
    side, words = 16, 32
    grid = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(side), torch.arange(side), indexing="ij"), -1)
    return {
        "hidden_states": torch.randn(1, side * side, 16),
        "encoder_hidden_states": torch.randn(1, words, 96),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.rand(1),
        "guidance": torch.full((1,), 3.5),
        "img_ids": grid.reshape(-1, 3).float(),
        "txt_ids": torch.zeros(words, 3),
    }


def _video(name: str, channels: int, frames: int, side: int, text: tuple[int, int]) -> Callable[[], Inputs]:
    """A clip; CogVideoX has frames before channels."""
    shape = (frames, channels) if name == "frames first" else (channels, frames)
    return lambda: {
        "hidden_states": torch.randn(1, *shape, side, side),
        "encoder_hidden_states": torch.randn(1, *text),
        "timestep": torch.randint(0, 1000, (1,)),
    }


CASES = (
    Case(
        "diffusers/unet_conditional",
        _model("UNet2DConditionModel", **_UNET, **_UNET_UP),
        _latents(4, 32, encoder_hidden_states=(2, 16, 128)),
    ),
    Case(
        "diffusers/unet_unconditional",
        _model(
            "UNet2DModel",
            sample_size=32,
            block_out_channels=(64, 128, 128),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        ),
        _latents(3, 32),
    ),
    Case("diffusers/control_net", Controlled, _latents(4, 32, encoder_hidden_states=(2, 16, 128), hint=(2, 3, 64, 64))),
    Case(
        "diffusers/denoising",
        Denoising,
        lambda: (torch.randn(1, 4, 32, 32), torch.randn(2, 16, 128)),
        part="unet",
    ),
    Case(
        "diffusers/unet_training",
        _model("UNet2DConditionModel", **_UNET, **_UNET_UP),
        _latents(4, 16, encoder_hidden_states=(2, 16, 128)),
        train=True,
    ),
    Case(
        "diffusers/vae_two_levels",
        _model("AutoencoderKL", block_out_channels=(32, 64), latent_channels=4, **_VAE_2),
        _image(128),
    ),
    Case(
        "diffusers/vae",
        _model("AutoencoderKL", block_out_channels=(32, 64, 128, 128), layers_per_block=2, latent_channels=4, **_VAE_4),
        _image(128),
    ),
    Case("diffusers/vae_tiny", TinyAutoencoder, _image(64)),
    Case(
        "diffusers/vq",
        _model("VQModel", block_out_channels=(32, 64), num_vq_embeddings=64, **_VAE_2),
        _image(64),
        keep_weights=True,
    ),
    Case(
        "diffusers/dit",
        _model(
            "DiTTransformer2DModel",
            num_attention_heads=6,
            attention_head_dim=64,
            num_layers=6,
            sample_size=32,
            num_embeds_ada_norm=1000,
        ),
        lambda: {
            "hidden_states": torch.randn(1, 4, 32, 32),
            "timestep": torch.randint(0, 1000, (1,)),
            "class_labels": torch.randint(0, 1000, (1,)),
        },
    ),
    Case(
        "diffusers/flux",
        _model(
            "FluxTransformer2DModel",
            in_channels=16,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=96,
            pooled_projection_dim=64,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        ),
        _flux,
    ),
    Case(
        "diffusers/sd3",
        _model(
            "SD3Transformer2DModel",
            sample_size=32,
            num_layers=4,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=96,
            caption_projection_dim=256,
            pooled_projection_dim=64,
            pos_embed_max_size=32,
        ),
        lambda: {
            "hidden_states": torch.randn(1, 16, 32, 32),
            "encoder_hidden_states": torch.randn(1, 24, 96),
            "pooled_projections": torch.randn(1, 64),
            "timestep": torch.randint(0, 1000, (1,)),
        },
    ),
    Case(
        "diffusers/pixart",
        _model(
            "PixArtTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=64,
            num_layers=4,
            sample_size=32,
            cross_attention_dim=256,
            caption_channels=96,
        ),
        lambda: {
            "hidden_states": torch.randn(1, 4, 32, 32),
            "encoder_hidden_states": torch.randn(1, 24, 96),
            "timestep": torch.randint(0, 1000, (1,)),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    Case(
        "diffusers/wan_video",
        _model(
            "WanTransformer3DModel",
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=16,
            out_channels=16,
            text_dim=96,
            freq_dim=64,
            ffn_dim=512,
            num_layers=3,
        ),
        _video("channels first", 16, 3, 16, (24, 96)),
    ),
    Case(
        "diffusers/cogvideox",
        _model(
            "CogVideoXTransformer3DModel",
            num_attention_heads=4,
            attention_head_dim=64,
            num_layers=3,
            text_embed_dim=96,
            max_text_seq_length=24,
            sample_width=16,
            sample_height=16,
            sample_frames=9,
        ),
        _video("frames first", 16, 3, 16, (24, 96)),
    ),
    Case(
        "diffusers/unet_audio",
        _model(
            "UNet1DModel",
            sample_size=512,
            in_channels=2,
            out_channels=2,
            extra_in_channels=64,
            block_out_channels=(32, 32, 64),
            time_embedding_type="fourier",
            use_timestep_embedding=False,
        ),
        lambda: {"sample": torch.randn(1, 2, 512), "timestep": torch.randint(0, 1000, (1,))},
    ),
)
