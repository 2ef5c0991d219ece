"""Fixtures of the training tests: one fresh kernel cache, a fresh Dynamo for every test."""

from __future__ import annotations

from tests.compiling import fresh_dynamo, kernel_cache

__all__ = ["fresh_dynamo", "kernel_cache"]
