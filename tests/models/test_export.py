"""The zoo as files: every model runs without Python, and computes what its plan did, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.catalogue import MODELS
from tests.artifact.exported_for_tests import exported
from tests.ecosystem.export_trial import ZOO, zoo_attempt
from torch_hybrid_backend.artifact import model as artifact_model

# Faster R-CNN has sizes that depend on values, which torch.export refuses.
_NAMES = [name for name in MODELS if name != "faster_rcnn"]
# Convolutions, attention with a mask and causal, a loop: the other models have no step of another kind.
_QUICK = {"resnet50", "bert_base", "gpt2", "lstm"}


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `load` compare the sample call bit for bit."""
    monkeypatch.setattr(artifact_model, "is_close", lambda result, expected, _: torch.equal(result, expected))


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.full) for n in _NAMES])
def test_as_written(name: str, tmp_path: Path) -> None:
    """No operator is left to Python or PyTorch; other inputs give eager's results."""
    entry = MODELS[name]
    model = entry.build("small")
    report, loaded = exported(model, entry.inputs("small", 1, 0), tmp_path)
    assert not report.python_parts
    assert not report.needs_torch
    inputs = entry.inputs("small", 1, 1)
    with torch.no_grad():
        found, expected = (torch.utils._pytree.tree_leaves(each(*inputs)) for each in (loaded, model))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# Files of any batch are tested on small modules by tests/artifact/test_model.py and tests/runner/test_runner.py; one
# model shows that they serve a whole one.
@pytest.mark.parametrize("name", [n if n == "gpt2" else pytest.param(n, marks=pytest.mark.full) for n in _NAMES])
def test_for_many_batches(name: str) -> None:
    """A file serves batches of 1 to 8; at each of them it has the live plan's results, bit for bit, in Python and in the runner."""
    outcome = zoo_attempt(f"{ZOO}{name}")
    assert not outcome.refused
    assert not outcome.wrong
    assert len(outcome.sizes) == 1
    assert outcome.in_runner


@pytest.mark.full
@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("precision", ["bf16", "int8", "int8-weights", "int4-weights"])
@pytest.mark.parametrize("name", ["resnet50", "bert_base", "gpt2", "llama_small"])
def test_in_another_precision(name: str, precision: str, tmp_path: Path) -> None:
    """The plan in the file is the one that was checked against the model as written."""
    entry = MODELS[name]
    options = {"precision": precision, "precision_tolerance": 1.0}
    report, _ = exported(entry.build("small"), entry.inputs("small", 2, 0), tmp_path, options=options)
    assert not report.python_parts
    assert not report.needs_torch
