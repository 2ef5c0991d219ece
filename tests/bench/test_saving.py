"""The sample of a `.hybrid` file, as other processes get it, and the check of answers against it. test_files.py saves models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.file_for_tests import exported_to
from torch_hybrid_backend import load
from torch_hybrid_backend.bench import saving
from torch_hybrid_backend.bench.worker import State


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_to(tmp_path_factory.mktemp("saving"))


def test_the_sample_is_written(file: Path, tmp_path: Path) -> None:
    """Other processes get the tensors of the sample's arguments as arrays, and its results."""
    saving.write_sample(file, tmp_path)
    args, kwargs = load(file).flat_entry().sample_call
    x, shift = (torch.from_numpy(np.load(tmp_path / f"input{number}.npy")) for number in range(2))
    assert torch.equal(x, args[0])
    assert torch.equal(shift, kwargs["shift"])
    (expected,) = torch.load(tmp_path / "expected.pt", weights_only=True)
    with torch.no_grad():
        assert torch.equal(load(file)(x, shift=shift)["logits"], expected)


def test_a_file_is_its_own_answer(file: Path, tmp_path: Path) -> None:
    """Opened as an answering process opens it, the file is off by nothing; with another sample it is wrong."""
    saving.write_sample(file, tmp_path)
    message = saving.Open("hybrid", file, tmp_path, torch.get_num_threads())
    assert message.answer(State()) == ("", 0.0)
    (expected,) = torch.load(tmp_path / "expected.pt", weights_only=True)
    torch.save([-expected], tmp_path / "expected.pt")
    wrong, _ = message.answer(State())
    assert wrong.startswith("wrong answer: off by 2 times the sample's root mean square: is it the model")
