"""The models that only benchmarks use: worth timing, and right on this backend."""

from __future__ import annotations

import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import run
from benchmarks.catalogue import MODELS
from benchmarks.networks import Darknet53
from benchmarks.vision_models import VISION
from benchmarks.weights import randomise


def test_darknet_has_53_layers() -> None:
    """52 convolutions and the classifier, as published; random weights give outputs of order one that differ between images."""
    with torch.device("meta"):
        full = Darknet53((1, 2, 8, 8, 4), 32, 1000)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in full.modules()) == 53
    small, (images,) = MODELS["darknet53"].build("small"), MODELS["darknet53"].inputs("small", batch=2)
    with torch.no_grad():
        first, second = small(images)
    assert 0.01 < first.std().item() < 10
    assert not torch.allclose(first, second, rtol=0.05)


def test_relus_without_norms_do_not_fade() -> None:
    """A deep stack such as VGG's keeps the size of its activations."""
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())))
    images = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    randomise(model, (images,))
    with torch.no_grad():
        assert 0.1 < model(images).std().item() < 10


@pytest.mark.full
def test_vision_models_are_right(tmp_path: Path) -> None:
    """Small, each in the benchmark's own processes: hybrid's results are eager's, or the run fails."""
    if PathFinder.find_spec("torchvision", [*sys.path, str(Path(sys.prefix) / "torchvision")]) is None:
        pytest.skip("needs torchvision: make .venv/torchvision")
    out = tmp_path / "zoo.json"
    short = ["--size", "small", "--batch", "2", "--seconds", "0.2", "--rounds", "1", "--no-warm", "--no-overhead"]
    status = run.main([*short, "--models", ",".join(VISION), "--peers", "eager,hybrid", "--out", str(out)])
    gaps = [result for result in json.loads(out.read_text())["results"] if "gap" in result]
    assert (status, gaps) == (0, [])
