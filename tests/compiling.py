"""Fixtures of tests that compile: their conftest.py imports them, and they are in use for all of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(kernel_directory: Path) -> Iterator[None]:
    """Set the kernel cache of the run, which processes that tests start use too; the user's own is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_CACHE_DIR", str(kernel_directory))
        # By measurement, eager would win some of these small regions, on some days: their kernels would go untested.
        patch.setenv("HYBRID_PLACEMENT", "estimate")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Every test compiles anew, and leaves nothing to the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
