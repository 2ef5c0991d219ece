"""Models of the zoo, exported and run by the runner: bit for bit what Python gets of the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.catalogue import MODELS
from tests.artifact.exported_for_tests import exported
from tests.runner.runner_in_python import Runner

# Faster R-CNN has sizes that depend on values, which torch.export refuses.
_NAMES = [name for name in MODELS if name != "faster_rcnn"]
_QUICK = {"mobilenet_v2", "gpt2"}
_PRECISIONS = ["bf16", "int8", "int4-weights"]

pytestmark = pytest.mark.slow


def _check(name: str, runner: Runner, folder: Path, **options: object) -> None:
    entry = MODELS[name]
    inputs = entry.inputs("small", 1, 0)
    _, loaded = exported(entry.build("small"), inputs, folder, options=options)
    with torch.no_grad():
        expected = [each for each in torch.utils._pytree.tree_leaves(loaded(*inputs)) if isinstance(each, torch.Tensor)]
    opened = runner.open(folder / "model.hybrid", threads=torch.get_num_threads())
    given = [each.numpy() for each in torch.utils._pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)]
    found = opened.run(*given, outputs=len(expected))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other.numpy())


@pytest.mark.parametrize("name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.full) for n in _NAMES])
def test_as_written(name: str, runner: Runner, tmp_path: Path) -> None:
    """Every model of the zoo."""
    _check(name, runner, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("precision", _PRECISIONS)
@pytest.mark.parametrize("name", ["resnet50", "llama_small"])
def test_in_another_precision(name: str, precision: str, runner: Runner, tmp_path: Path) -> None:
    """Kernels of reduced precision and their packed weights."""
    _check(name, runner, tmp_path, precision=precision, precision_tolerance=1.0)
