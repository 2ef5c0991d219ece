"""Models written here in plain PyTorch: what transformers has no plain counterpart for, and two small ones to train."""

from __future__ import annotations

import torch
from torch import nn


class LstmLayer(nn.Module):
    """`torch.nn.LSTM` of one layer, batch first, written with its linear layers.

    Dynamo traces `torch.nn.LSTM` only for this backend (unless `torch._dynamo.config.allow_rnn`): no other would see the model.
    x: (batch, length, inputs) float32.  Returns: the hidden states, (batch, length, width).
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(inputs, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.from_input(x)
        hidden = cell = x.new_zeros(x.shape[0], self.width)
        states: list[torch.Tensor] = []
        for step in projected.unbind(dim=1):
            enter, forget, update, leave = (step + self.from_hidden(hidden)).chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(update)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(hidden)
        return torch.stack(states, dim=1)


class LstmClassifier(nn.Module):
    """Embedding, two LSTM layers, a linear head on the last step.

    tokens: (batch, length) int64.  Returns: (batch, classes) float32.
    """

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(LstmLayer(width, width), LstmLayer(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.layers(self.embedding(tokens))
        logits: torch.Tensor = self.head(states[:, -1])
        return logits


class DoubleConvolution(nn.Sequential):
    """Twice: 3x3 convolution, batch norm, ReLU. (batch, channels_in, h, w) -> (batch, channels_out, h, w)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Encoder and decoder with skip connections (Ronneberger et al. 2015; padded, with batch norm).

    x: (batch, 3, h, w) float32, h and w multiples of 2**levels.  Returns: (batch, classes, h, w).
    """

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConvolution(i, o) for i, o in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(DoubleConvolution(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for rise, block, skip in zip(self.rise, self.up, reversed(skips), strict=True):
            x = block(torch.cat([skip, rise(x)], dim=1))
        logits: torch.Tensor = self.head(x)
        return logits


class ConvolutionUnit(nn.Sequential):
    """Convolution (stride 2 halves the image), batch norm, leaky ReLU: the unit that Darknet-53 is made of."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.LeakyReLU(0.1, inplace=True),
        )


class DarknetBlock(nn.Module):
    """A 1x1 convolution to half the channels, a 3x3 one back, and the input added. x: (batch, channels, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = ConvolutionUnit(channels, channels // 2, 1)
        self.widen = ConvolutionUnit(channels // 2, channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.widen(self.narrow(x))
        return x + widened


class Darknet53(nn.Module):
    """The backbone of YOLOv3 (Redmon and Farhadi 2018) with its classifier; the published depths are (1, 2, 8, 8, 4), the width 32.

    x: (batch, 3, h, w) float32, h and w multiples of 2**len(depths).  Returns: (batch, classes).
    """

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [ConvolutionUnit(3, width, 3)]
        for depth in depths:
            stages.append(ConvolutionUnit(width, 2 * width, 3, stride=2))
            width *= 2
            stages += [DarknetBlock(width) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return logits


class SmallCnn(nn.Module):
    """A classifier small enough to train in tests: two stages with batch norm, a residual connection, average pooling.

    x: (batch, 3, h, w) float32.  Returns: (batch, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.stem(x), 2)
        x = torch.relu(x + self.body(x))
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class SmallTransformer(nn.Module):
    """A classifier small enough to train in tests: embedding, one pre-norm encoder layer without dropout, mean pooling.

    tokens: (batch, length) int64, length <= 32.  Returns: (batch, 10).
    """

    def __init__(self, vocabulary: int = 100, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(32, width) * 0.02)
        self.layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.layer(x).mean(dim=1))
        return logits


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2)) times a weight (Zhang and Sennrich 2019), computed in float32. x: (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled: torch.Tensor = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return scaled * self.weight


class LlamaBlock(nn.Module):
    """A layer of Llama 3 (Dubey et al. 2024): RMS norm, rotary positions, grouped heads, causal attention, SwiGLU.

    x: (batch, length, width).  Returns: the same shape.
    """

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.before_attention, self.before_hidden = RmsNorm(width), RmsNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before_attention(x)
        query = self.query(y).view(batch, length, self.heads, self.head_width)
        key, value = self.key_value(y).view(batch, length, 2, self.groups, self.head_width).unbind(2)
        query, key, value = (each.transpose(1, 2) for each in (_rotated(query), _rotated(key), value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.before_hidden(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021). x: (batch, length, heads, width)."""
    half = x.shape[-1] // 2
    frequencies = 500_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)


class DecodingStep(nn.Module):
    """GPT-2 (Radford et al. 2019) generating one token, over a cache of `length` places of which those up to `position` are filled.

    tokens: (batch, 1) int64; position: (1,) int64.  Returns: logits, (batch, 1, vocabulary). It writes the cache, its buffers, in place.
    """

    cache: torch.Tensor

    def __init__(self, batch: int, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.inward = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outward = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.register_buffer("cache", torch.randn(layers, 2, batch, heads, length, width // heads))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch, _ = tokens.shape
        x = self.tokens(tokens) + self.places(position)
        seen = torch.arange(self.cache.shape[-2], device=position.device) <= position
        for layer, (inward, outward, up, down) in enumerate(
            zip(self.inward, self.outward, self.up, self.down, strict=True)
        ):
            query, *new = (
                inward(self.norms[2 * layer](x)).view(batch, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            )
            for which, value in enumerate(new):
                self.cache[layer, which].index_copy_(2, position, value)
            keys, values = self.cache[layer].unbind(0)
            attended = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen[None, None, None])
            x = x + outward(attended.transpose(1, 2).reshape(batch, 1, -1))
            x = x + down(nn.functional.gelu(up(self.norms[2 * layer + 1](x)), approximate="tanh"))
        logits: torch.Tensor = nn.functional.linear(self.norms[-1](x), self.tokens.weight)
        return logits


class DiffusionBlock(nn.Module):
    """A block of the U-Net of a diffusion model (Rombach et al. 2022): a residual block told the time, and self-attention over pixels.

    x: (batch, channels, h, w); time: (batch, width).  Returns: x's shape.
    """

    def __init__(self, channels: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(3))
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(width, channels)
        self.inward, self.outward = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        silu = nn.functional.silu
        y = self.first(silu(self.norms[0](x))) + self.time(silu(time))[:, :, None, None]
        x = x + self.second(silu(self.norms[1](y)))
        batch, channels, height, width = x.shape
        y = self.norms[2](x).flatten(2).transpose(1, 2)
        parts = self.inward(y).view(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2)
        mixed = self.outward(attended.reshape(batch, height * width, channels))
        result: torch.Tensor = x + mixed.transpose(1, 2).view(x.shape)
        return result
