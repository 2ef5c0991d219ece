"""Fixtures of the model tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def backend() -> str:
    """The backend under test. `MODEL_TEST_BACKEND=aot_eager` tells a fault of the tests or of torch from one of ours."""
    return os.environ.get("MODEL_TEST_BACKEND", "hybrid")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One fresh kernel cache for the session: nothing is taken from, or left in, the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        # By measurement, eager would win some of these small regions, on some days: their kernels would go untested.
        patch.setenv("HYBRID_PLACEMENT", "estimate")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Every test compiles anew, and leaves nothing to the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
