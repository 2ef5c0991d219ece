"""Fixtures of the model tests."""

from __future__ import annotations

import os

import pytest

from tests.compiling import by_estimate, fresh_dynamo

__all__ = ["backend", "by_estimate", "fresh_dynamo"]


@pytest.fixture
def backend() -> str:
    """The backend under test. `MODEL_TEST_BACKEND=aot_eager` tells a fault of the tests or of torch from one of ours."""
    return os.environ.get("MODEL_TEST_BACKEND", "hybrid")
