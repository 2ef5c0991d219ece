"""Fixtures of tests that compile: their conftest.py imports them, and they are in use for all of its folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


# Not "session": tests of other folders would find the setting after these.
@pytest.fixture(scope="module", autouse=True)
def by_estimate() -> Iterator[None]:
    """Have placement estimate, in processes that tests start too; no network."""
    with pytest.MonkeyPatch.context() as patch:
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
