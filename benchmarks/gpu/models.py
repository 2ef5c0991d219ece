"""The models of the table, in the order in which they are measured. All have random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.models import ZOO, Size
from benchmarks.networks import DecodingStep, DiffusionBlock, LlamaBlock
from benchmarks.training import CASES as TRAINING
from benchmarks.training import OPTIMISERS, Batch

Call = Callable[[], Any]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Built:
    """A model on its device. `model`: what peers compile; `call(compiled)` is one call, or one step, of it, whose results are compared."""

    model: nn.Module
    call: Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True, slots=True)
class ModelCase:
    """`build(size, batch, dtype, device)`. `trains`: a call is a training step, which needs gradients and changes the model."""

    name: str
    title: str
    build: Callable[[Size, int, torch.dtype, str], Built]
    trains: bool = False


def _moved(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in tensors)


def _zoo(name: str, *, images: bool = False) -> Callable[[Size, int, torch.dtype, str], Built]:
    """A model of the zoo; images and their convolutions channels last, as GPUs want them."""

    def build(size: Size, batch: int, dtype: torch.dtype, device: str) -> Built:
        model = ZOO[name].build(size).to(device, dtype)
        inputs = _moved(ZOO[name].inputs(size, batch), dtype, device)
        if images:
            model = model.to(memory_format=torch.channels_last)
            inputs = tuple(t.contiguous(memory_format=torch.channels_last) for t in inputs)
        return Built(model, lambda compiled: compiled(*inputs))

    return build


def _written(
    make: Callable[[bool, int], tuple[nn.Module, tuple[torch.Tensor, ...]]], *, images: bool = False
) -> Callable[[Size, int, torch.dtype, str], Built]:
    """A model of `benchmarks.networks`: `make(small, batch)` gives it and its inputs."""

    def build(size: Size, batch: int, dtype: torch.dtype, device: str) -> Built:
        torch.manual_seed(0)
        model, inputs = make(size == "small", batch)
        model = model.eval().to(device, dtype)
        moved = _moved(inputs, dtype, device)
        if images:
            model = model.to(memory_format=torch.channels_last)
            moved = tuple(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in moved)
        return Built(model, lambda compiled: compiled(*moved))

    return build


def _decoding(small: bool, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers, width, heads, length, vocabulary = (2, 64, 4, 32, 100) if small else (12, 768, 12, 1024, 50257)
    tokens = torch.randint(vocabulary, (batch, 1))
    return DecodingStep(batch, layers, width, heads, length, vocabulary), (tokens, torch.tensor([length // 2]))


def _llama(small: bool, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    width, heads, groups, hidden, length = (64, 4, 2, 128, 24) if small else (4096, 32, 8, 14336, 2048)
    return LlamaBlock(width, heads, groups, hidden), (torch.randn(batch, length, width),)


def _diffusion(small: bool, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    channels, width, heads, side = (64, 32, 4, 8) if small else (640, 1280, 10, 32)
    return DiffusionBlock(channels, width, heads), (torch.randn(batch, channels, side, side), torch.randn(batch, width))


def _training(name: str) -> Callable[[Size, int, torch.dtype, str], Built]:
    """A step of SGD, whose loss is compared; `batch` times the case's own batch."""
    case = TRAINING[name]

    def build(size: Size, batch: int, dtype: torch.dtype, device: str) -> Built:
        torch.manual_seed(0)
        model = case.make(size).train().to(device, dtype)
        own = case.batch(size)
        whole: Batch = tuple(t.repeat(batch, *[1] * (t.dim() - 1)) for t in own)  # type: ignore[assignment]
        inputs, targets = _moved(whole, dtype, device)
        optimiser = OPTIMISERS["sgd"](model)

        def step(compiled: Callable[..., Any]) -> torch.Tensor:
            optimiser.zero_grad()
            loss = case.loss(compiled, (inputs, targets))
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            return loss.detach()

        return Built(model, step)

    return build


def wider(built: ModelCase, size: Size, batch: int, dtype: torch.dtype, device: str) -> Built:
    """The same case in the dtype that results of `dtype` are judged by."""
    return built.build(size, batch, torch.float64 if dtype is torch.float32 else torch.float32, device)


CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("resnet50", "ResNet-50", _zoo("resnet50", images=True)),
        ModelCase("convnext", "ConvNeXt-T", _zoo("convnext_tiny", images=True)),
        ModelCase("vit_b16", "ViT-B/16", _zoo("vit_b16")),
        ModelCase("bert_base", "BERT-base", _zoo("bert_base")),
        ModelCase("gpt2_prefill", "GPT-2, prefill", _zoo("gpt2")),
        ModelCase("gpt2_decode", "GPT-2, decode", _written(_decoding)),
        ModelCase("llama_block", "Llama 3 8B, one layer", _written(_llama)),
        ModelCase("diffusion_block", "U-Net block", _written(_diffusion, images=True)),
        ModelCase("training", "BERT, MiniLM's size, training step", _training("encoder"), trains=True),
    )
}
