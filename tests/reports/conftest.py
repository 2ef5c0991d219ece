"""Fixtures of tests of reports: a kernel cache of their own, compiled code in place of the faster, a fresh Dynamo."""

from __future__ import annotations

from tests.compiling import fresh_dynamo, kernel_cache

__all__ = ["fresh_dynamo", "kernel_cache"]
