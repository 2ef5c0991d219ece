"""Models exported to a file and opened again, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.artifact.model import LoadedModel, load
from torch_hybrid_backend.driver.export import ExportReport, export

FAST = {"placement": "estimate", "strict": True}


def exported(
    model: torch.nn.Module, args: Sequence[Any], folder: Path, **given: Any
) -> tuple[ExportReport, LoadedModel]:
    """The report of an export, and the model opened from its file, whose sample call has been made."""
    options: Mapping[str, object] = {**FAST, **given.pop("options", {})}
    report = export(model, tuple(args), folder / "model.hybrid", options=options, **given)
    return report, load(report.path)
