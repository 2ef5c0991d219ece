"""Fixtures of the training tests: placement by estimate, a fresh Dynamo for every test."""

from __future__ import annotations

from tests.compiling import by_estimate, fresh_dynamo

__all__ = ["by_estimate", "fresh_dynamo"]
