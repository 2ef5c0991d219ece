"""Fixtures of the ecosystem tests: a cache of their own, a fresh Dynamo, no network, placement without timing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def settings(kernel_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings as on a new user's machine, except that placement does not time: by measurement, eager would win some of these
    small regions, on some days, and what the tests mean to run would not run."""
    for name in [name for name in os.environ if name.startswith("HYBRID_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(kernel_directory))
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield monkeypatch
    torch._dynamo.reset()
