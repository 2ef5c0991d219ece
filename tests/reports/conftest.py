"""Fixtures of tests of reports: compiled code in place of the faster, a fresh Dynamo."""

from __future__ import annotations

from tests.compiling import by_estimate, fresh_dynamo

__all__ = ["by_estimate", "fresh_dynamo"]
