"""Fixtures of the training tests: one fresh kernel cache, a fresh Dynamo for every test."""

from __future__ import annotations

from tests.compiling import by_estimate, fresh_dynamo

__all__ = ["by_estimate", "fresh_dynamo"]
