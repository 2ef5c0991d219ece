"""Classify images: eager beside hybrid, and where the time goes.

pip install transformers
python examples/vision.py                       # ResNet-50 on one image of 224 x 224 pixels
python examples/vision.py --precision int8      # the same model on integers of 8 bits
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer
from transformers import ResNetConfig, ResNetForImageClassification

import torch_hybrid_backend

SMALL = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}


def milliseconds(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Return the median time of a call."""
    timer = Timer("function(x)", globals={"function": function, "x": x}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=1).median * 1e3


@torch.no_grad()
def main() -> None:
    """Compile, compare and time one model."""
    parser = argparse.ArgumentParser(description="Classify images: eager beside hybrid.")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", default="as-written", help="see docs/precision.md")
    parser.add_argument("--small", action="store_true", help="a model that compiles in seconds")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    # With a network connection: ResNetForImageClassification.from_pretrained("microsoft/resnet-50")
    model = ResNetForImageClassification(ResNetConfig(**(SMALL if arguments.small else {}))).eval()
    size = 64 if arguments.small else 224
    images = torch.randn(arguments.batch, 3, size, size)

    # Errors grow from layer to layer in a network with random weights, far more than in a trained one: hence the tolerance.
    options = {"precision": arguments.precision, "precision_tolerance": 1.0}
    fast = torch.compile(model, backend="hybrid", options=options)
    expected, logits = model(images).logits, fast(images).logits
    error = (logits - expected).norm() / expected.norm()
    print(torch_hybrid_backend.explain(model, images, options=options))
    eager, hybrid = milliseconds(model, images), milliseconds(fast, images)
    print(
        f"eager {eager:.2f} ms, hybrid {hybrid:.2f} ms: {eager / hybrid:.2f} times as fast; relative error {error:.1e}"
    )


if __name__ == "__main__":
    main()
