"""Compilation by an engine that may be a stranger's: it ends in time, whatever the engine does."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, Engine
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.errors import CompileError, DeadlineError

_GRACE_S = 1.0  # an engine that looks at the clock between two regions is a little late


def compile_in_time(
    engine: Engine, regions: Sequence[Region], deadline: Deadline
) -> Sequence[CompiledRegion | Exception]:
    """What `engine.compile` returns, or for each region the exception that tells why it returned nothing of use. The deadline's clock runs
    meanwhile; where it is over already the engine is asked all the same, for what it need not compile.

    An engine that says `keeps_deadline = True` is called in this thread: Ctrl-C then reaches it. Any other runs in a thread of its own, which
    is left to itself when the deadline has passed: nothing can stop it, but nobody waits for it.
    """
    with deadline.running():
        if getattr(engine, "keeps_deadline", False):
            return _compiled(engine, regions, deadline)
        made: list[Sequence[CompiledRegion | Exception]] = []
        grad = torch.is_grad_enabled()

        def work() -> None:
            with torch.set_grad_enabled(grad):
                made.append(_compiled(engine, regions, deadline))

        thread = threading.Thread(target=work, name=f"hybrid-compile-{engine.name}", daemon=True)
        left_s = deadline.left_s()
        thread.start()
        thread.join(left_s + _GRACE_S)
    if made:
        return made[0]
    had = f"{left_s:.3g} s it had of {deadline.limit_s:g} (HYBRID_COMPILE_DEADLINE_S)"
    return [DeadlineError(f"{engine.name} compiles on after the {had}; it is not waited for")] * len(regions)


def _compiled(engine: Engine, regions: Sequence[Region], deadline: Deadline) -> Sequence[CompiledRegion | Exception]:
    try:
        compiled = engine.compile(regions, _as_asked_for(engine, deadline))
        if len(compiled) == len(regions):
            return compiled
        error: Exception = CompileError(f"{engine.name} returned {len(compiled)} results for {len(regions)} regions")
    except Exception as raised:  # against the protocol, but a third party's engine may
        error = raised
    return [error] * len(regions)


def _as_asked_for(engine: Engine, deadline: Deadline) -> Any:
    """The deadline, or its seconds for an engine whose `compile` has a parameter `deadline_s`."""
    return deadline.left_s() if "deadline_s" in inspect.signature(engine.compile).parameters else deadline
