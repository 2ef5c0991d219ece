"""Fixture `file`: a file of a small model that nobody has signed yet, for tests of signatures; a new one for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import exported


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the file."""
    report, _ = exported(nn.Linear(3, 2).eval(), (torch.zeros(1, 3),), tmp_path_factory.mktemp("unsigned"))
    return report.path.read_bytes()


@pytest.fixture
def file(content: bytes, tmp_path: Path) -> Path:
    """The file's path."""
    path = tmp_path / "model.hybrid"
    path.write_bytes(content)
    path.chmod(0o644)
    return path
