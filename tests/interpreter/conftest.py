"""The one line that makes the interpreter an engine."""

from __future__ import annotations

import pytest

from tests.compiling import by_estimate, fresh_dynamo
from tests.interpreter.backend import InterpreterBackend
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.driver import session

__all__ = ["by_estimate", "fresh_dynamo"]

INTERPRETER = ("interpreter", lambda config, services: KernelEngine(InterpreterBackend(), config, services))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="hybrid"` has the interpreter in place of TVM; what fails raises."""
    monkeypatch.setattr(session, "ENGINES", (INTERPRETER, *session.ENGINES[-1:]))
    monkeypatch.setattr(session, "_sessions", {})
    monkeypatch.setenv("HYBRID_STRICT", "1")
