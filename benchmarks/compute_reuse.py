"""Reuse of computation between similar rows of a convolution (DeepReuse), beside our kernels.

    pip install pillow scikit-learn
    python -m benchmarks.compute_reuse [--bits 8 12 16] [--lengths 9 27 72 576]

DeepReuse (Ning & Shen, ICS 2019) cuts the rows of a convolution's im2col matrix into pieces of a few elements. Pieces with equal hashes, the
signs of some random projections, are one cluster: its centroid is multiplied with the weight, and each row adds up its clusters' products.

The images are scikit-learn's two photographs. The weights of ResNet-50 and VGG-16 are random, as the package of neither has trained ones; so
accuracy is measured on a small VGG that is trained here on scikit-learn's digits.

Columns: clusters of a piece, as a share of the rows; the relative error (root mean square) of the layer's result; `bound`: how many times
faster the layer could be at most, counted in instructions, with grouping, centroids and memory free: a projection costs as much as an output
channel, the products cost their share of clusters, and the sums one addition for each piece in place of a multiply-add for each element;
`measured`: our kernel's time over that of the same steps by PyTorch's operators.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.measuring.measure import measure

_SIDE = 224


@dataclass(frozen=True, slots=True)
class Reuse:
    """Way of merging rows. `length`: elements of a piece; `bits`: projections."""

    length: int
    bits: int

    def clusters_of(self, pieces: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The cluster of each of (rows, length) pieces, and how many there are."""
        generator = torch.Generator().manual_seed(0)
        projections = torch.randn(pieces.shape[1], self.bits, generator=generator)
        signs = (pieces - pieces.mean(0)) @ projections > 0
        codes = (signs * (1 << torch.arange(self.bits))).sum(1)
        found, cluster = torch.unique(codes, return_inverse=True)
        return cluster, found.numel()

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(rows, K) times (K, N) by products of centroids, and the share of rows that these are."""
        total = torch.zeros(rows.shape[0], weight.shape[1])
        shares = []
        for start in range(0, rows.shape[1], self.length):
            pieces = rows[:, start : start + self.length]
            cluster, count = self.clusters_of(pieces)
            sums = torch.zeros(count, pieces.shape[1]).index_add_(0, cluster, pieces)
            sizes = torch.zeros(count).index_add_(0, cluster, torch.ones(rows.shape[0]))
            products = (sums / sizes[:, None]) @ weight[start : start + self.length]
            total += products[cluster]
            shares.append(count / rows.shape[0])
        return total, sum(shares) / len(shares)

    def bound(self, channels: int, share: float) -> float:
        """The most that can be gained for a layer of so many output channels."""
        return 1 / (self.bits / channels + share + 1 / self.length)


def convolution(conv: nn.Conv2d, x: torch.Tensor, reuse: Reuse) -> tuple[torch.Tensor, float]:
    """A convolution by merged rows, and the share of rows that were multiplied."""
    size, stride, padding = conv.kernel_size, conv.stride, conv.padding
    assert isinstance(padding, tuple)
    columns = functional.unfold(x, size, padding=padding, stride=stride)
    rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
    out, share = reuse.product(rows, conv.weight.flatten(1).t())
    if conv.bias is not None:
        out = out + conv.bias
    height = (x.shape[2] + 2 * padding[0] - size[0]) // stride[0] + 1
    return out.view(x.shape[0], -1, conv.out_channels).transpose(1, 2).reshape(
        x.shape[0], conv.out_channels, height, -1
    ), share


def photographs() -> torch.Tensor:
    """(2, 3, 224, 224) float32: scikit-learn's photographs, normalised as ImageNet's are."""
    from sklearn.datasets import load_sample_images

    images = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    small = functional.interpolate(
        images.permute(0, 3, 1, 2).float() / 255, size=(_SIDE, _SIDE), antialias=True, mode="bilinear"
    )
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (small - mean[:, None, None]) / deviation[:, None, None]


def vgg(channels: Sequence[int | str], classes: int, first: int = 3) -> nn.Sequential:
    """Convolutions of 3x3 with ReLU, "M" a maximum pooling, then averages and a linear layer."""
    layers: list[nn.Module] = []
    for width in channels:
        if isinstance(width, int):
            layers += [nn.Conv2d(first, width, 3, padding=1), nn.ReLU()]
            first = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, classes))


_VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig())


def layers(model: nn.Module, images: torch.Tensor, most: int) -> Iterator[tuple[str, nn.Conv2d, torch.Tensor]]:
    """Up to `most` convolutions of a model, spread over its depth, each with its input."""
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, arguments, _result: inputs.update({name: arguments[0]})

    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    handles = [module.register_forward_hook(keep(name)) for name, module in found.items()]
    model(images)
    for handle in handles:
        handle.remove()
    step = max(1, len(found) // most)
    for name in list(found)[1::step]:
        yield name, found[name], inputs[name]


def _of_model(title: str, model: nn.Module, reuses: Sequence[Reuse], most: int) -> None:
    model.eval()
    images = photographs()
    for _, conv, x in layers(model, images, most):
        torch.compiler.reset()  # every layer compiles the same code
        compiled = torch.compile(conv, backend="hybrid", dynamic=False)
        exact = conv(x)
        compiled(x)
        for reuse in reuses:
            if reuse.length > conv.weight[0].numel():
                continue
            merged, share = convolution(conv, x, reuse)
            error = ((merged - exact).square().mean() / exact.square().mean()).sqrt().item()
            ours, theirs = measure([partial(compiled, x), partial(convolution, conv, x, reuse)], 0.5)
            kernel = "x".join(map(str, conv.kernel_size))
            shape = f"{conv.in_channels}x{x.shape[2]}x{x.shape[3]} {kernel} to {conv.out_channels}"
            print(
                f"| {title} | {shape} | {reuse.length} | {reuse.bits} | {share:.3f} | {error:.3f} "
                f"| {reuse.bound(conv.out_channels, share):.2f} | {ours.low_us / theirs.low_us:.3f} |",
                flush=True,
            )


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    return functional.interpolate(images, size=(32, 32), mode="bilinear"), torch.from_numpy(found.target).long()


def _trained() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A small VGG, trained on three quarters of the digits, and the rest of them."""
    torch.manual_seed(0)
    images, labels = _digits()
    order = torch.randperm(len(labels))
    train, test = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    model = vgg((32, 32, "M", 64, 64, "M", 128, 128, "M"), 10, first=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(12):
        for batch in torch.split(train[torch.randperm(len(train))], 64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval(), images[test], labels[test]


def _accuracy(reuses: Sequence[Reuse]) -> None:
    """Prints the accuracy of the trained network with all its convolutions but the first by merged rows."""
    model, images, labels = _trained()
    with torch.no_grad():
        exact = (model(images).argmax(1) == labels).float().mean().item()
        print(f"\ndigits, as written: {100 * exact:.1f} %")
        for reuse in reuses:
            x, bounds = images, []
            for number, layer in enumerate(model):
                if isinstance(layer, nn.Conv2d) and number:
                    x, share = convolution(layer, x, reuse)
                    bounds.append(reuse.bound(layer.out_channels, share))
                else:
                    x = layer(x)
            points = 100 * ((x.argmax(1) == labels).float().mean().item() - exact)
            print(
                f"pieces of {reuse.length}, {reuse.bits} bits: {points:+.1f} points, bound {len(bounds) / sum(1 / b for b in bounds):.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 12, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[9, 27, 72, 576])
    parser.add_argument("--layers", type=int, default=5, help="of each model")
    arguments = parser.parse_args()
    reuses = [Reuse(length, bits) for length in arguments.lengths for bits in arguments.bits]
    print("| model | layer | piece | bits | clusters | error | bound | measured |\n|---|---|--:|--:|--:|--:|--:|--:|")
    torch.manual_seed(0)
    with torch.no_grad():
        _of_model("ResNet-50", _resnet50(), reuses, arguments.layers)
        _of_model("VGG-16", vgg(_VGG16, 1000), reuses, arguments.layers)
    _accuracy(reuses)


if __name__ == "__main__":
    main()
