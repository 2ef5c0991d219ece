"""Graph breaks as Dynamo tells them: where, why, and what to change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch._logging._internal import getArtifactLogger

import torch_hybrid_backend
from torch_hybrid_backend.capture.graph_breaks import graph_break, telling_graph_breaks
from torch_hybrid_backend.core.plan import GraphBreak


def _breaks(function: Callable[[torch.Tensor], torch.Tensor]) -> list[GraphBreak]:
    found: list[GraphBreak] = []
    torch.compiler.reset()
    with telling_graph_breaks(found.append):
        torch.compile(function, backend="eager")(torch.ones(4))
    return found


def _prints(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print(end="")
    return y.cos()


def test_a_break_tells_the_line_and_the_reason() -> None:
    """The user's line with its code, Dynamo's reason, and what to do; nothing that is for PyTorch's developers."""
    (found,) = _breaks(_prints)
    assert found.source.startswith("test_graph_breaks.py:")
    assert found.source.endswith(': print(end="")')
    assert "builtin" in found.reason
    assert "`print`" in found.explanation
    assert any("print" in hint for hint in found.hints)
    assert not any("issue" in hint for hint in found.hints)
    assert not found.is_last


def test_a_branch_on_data_is_a_break() -> None:
    """The reason alone is left of Dynamo's own words."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.cos()
        return x.sin()

    (found,) = _breaks(branches)
    assert "if x.sum() > 0:" in found.source
    assert found.reason == "Data-dependent branching"
    assert any("torch.cond" in hint for hint in found.hints)


def test_a_break_in_a_loop_leaves_the_rest_to_python() -> None:
    """No graph is made of it, and that is told too."""

    def loops(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.cos()
            torch._dynamo.graph_break()
        return x

    found = _breaks(loops)[-1]
    assert found.is_last
    assert "torch._dynamo.graph_break()" in found.source
    assert "loop" in found.explanation


def test_a_model_without_breaks_has_none() -> None:
    """Nor do other messages of the logger make one."""
    assert _breaks(lambda x: x.sin() + 1) == []
    assert graph_break("Graph break: something else") is None


def test_loggers_are_left_as_they_were() -> None:
    """A break in another thread is that thread's own."""
    logger = getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    before = (logger.level, logger.propagate, list(logger.handlers))
    found: list[GraphBreak] = []
    message = "Graph break in user code at /a/model.py:3\nGraph Break Reason: why\n\nUser code traceback:\n"
    with telling_graph_breaks(found.append):
        assert logger.isEnabledFor(logging.DEBUG)
        other = threading.Thread(target=logger.debug, args=[message])
        other.start()
        other.join()
        logger.debug(message)
    assert found == [GraphBreak("model.py:3", "why", "", ())]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_explain_tells_graph_breaks() -> None:
    """In the text and in JSON, each once."""
    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(_prints, torch.ones(4), profile=False)
    (found,) = explanation.graph_breaks
    text = str(explanation)
    assert text.startswith("1 graph break, where Dynamo leaves the model to Python:\n  test_graph_breaks.py:")
    assert f"    change: {found.hints[0]}" in text.splitlines()
    assert "graph 2 of 2: " in text
    assert f'"reason": "{found.reason}"' in explanation.to_json()
