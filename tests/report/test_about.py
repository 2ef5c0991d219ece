"""The head of a report."""

from __future__ import annotations

import torch

from torch_hybrid_backend import __version__
from torch_hybrid_backend.report import about_call


def test_model_inputs_machine_versions_and_date() -> None:
    """Tensors in nested arguments are shown too; of many, only the first."""
    about = about_call(
        torch.nn.Linear(2, 2), ([torch.zeros(3, 2), torch.tensor(1)],), {"mask": torch.ones(4, dtype=torch.bool)}
    )
    assert list(about) == ["model", "inputs", "machine", "versions", "date"]
    assert (about["model"], about["inputs"]) == ("Linear", "3x2 float32, scalar int64, 4 bool")
    assert f"{torch.get_num_threads()} thread" in about["machine"]
    assert torch.__version__ in about["versions"]
    assert f"hybrid {__version__}" in about["versions"]
    assert about_call(torch.relu, [torch.zeros(1)] * 6, {})["inputs"].endswith("and 2 more")
    assert about_call(torch.relu, [], {})["inputs"] == "no tensors"
