"""Compilation by an engine that may be a stranger's: it ends in time, whatever the engine does."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.engine import CompiledRegion, Engine
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.errors import CompileError, DeadlineError

_GRACE_S = 1.0  # an engine that looks at the clock between two regions is a little late


def compile_in_time(
    engine: Engine, regions: Sequence[Region], deadline_s: float
) -> Sequence[CompiledRegion | Exception]:
    """What `engine.compile` returns, or for each region the exception that tells why it returned nothing of use.

    An engine that says `keeps_deadline = True` is called in this thread: Ctrl-C then reaches it. Any other runs in a thread of its own, which
    is left to itself when the deadline has passed: nothing can stop it, but nobody waits for it.
    """
    if getattr(engine, "keeps_deadline", False):
        return _compiled(engine, regions, deadline_s)
    made: list[Sequence[CompiledRegion | Exception]] = []
    grad = torch.is_grad_enabled()

    def work() -> None:
        with torch.set_grad_enabled(grad):
            made.append(_compiled(engine, regions, deadline_s))

    thread = threading.Thread(target=work, name=f"hybrid-compile-{engine.name}", daemon=True)
    thread.start()
    thread.join(deadline_s + _GRACE_S)
    if made:
        return made[0]
    return [DeadlineError(f"{engine.name} compiles on after {deadline_s:g} s; it is not waited for")] * len(regions)


def _compiled(engine: Engine, regions: Sequence[Region], deadline_s: float) -> Sequence[CompiledRegion | Exception]:
    try:
        compiled = engine.compile(regions, deadline_s)
        if len(compiled) == len(regions):
            return compiled
        error: Exception = CompileError(f"{engine.name} returned {len(compiled)} results for {len(regions)} regions")
    except Exception as raised:  # against the protocol, but a third party's engine may
        error = raised
    return [error] * len(regions)
