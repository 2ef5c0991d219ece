"""Compilation by an engine that may be a stranger's: it ends in time, whatever the engine does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch

from torch_hybrid_backend.cancellation import patience
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, Engine, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.errors import CompileError, DeadlineError, failures, is_sticky

_log = logging.getLogger(__name__)

_Made = CompiledRegion | PendingRegion | Exception
_GRACE_S = 1.0  # an engine that looks at the clock between two regions is a little late


def compile_in_time(
    engine: Engine, regions: Sequence[Region], deadline: Deadline
) -> Sequence[CompiledRegion | PendingRegion | Exception]:
    """Compile regions in time. Returns what `engine.compile` returns, or for each region the exception that tells why it returned nothing of
    use; where it raises, it is asked for each region alone, so that the others keep it. The deadline's clock runs meanwhile; where it is over
    already the engine is asked all the same, for what it need not compile.

    An engine that says `keeps_deadline = True` is called in this thread: Ctrl-C then reaches it. Any other runs in a thread of its own, which
    is left to itself when the deadline has passed: nothing can stop it, but nobody waits for it.
    """
    with deadline.running():
        if engine.keeps_deadline:
            return _compiled(engine, regions, deadline)
        made: list[Sequence[_Made]] = []
        grad = torch.is_grad_enabled()

        def work() -> None:
            with torch.set_grad_enabled(grad):
                made.append(_compiled(engine, regions, deadline))

        thread = threading.Thread(target=work, name=f"hybrid-compile-{engine.name}", daemon=True)
        left_s = deadline.left_s()
        thread.start()
        until = time.monotonic() + left_s + _GRACE_S
        while thread.is_alive() and (left := until - time.monotonic()) > 0:
            thread.join(patience(left))
    if made:
        return made[0]
    had = f"{left_s:.3g} s it had of {deadline.limit_s:g} (HYBRID_COMPILE_DEADLINE_S)"
    return [
        DeadlineError(f"{engine.name} did not finish compiling in the {had}; its regions fall back to eager")
    ] * len(regions)


def _compiled(engine: Engine, regions: Sequence[Region], deadline: Deadline) -> Sequence[_Made]:
    try:
        compiled = engine.compile(regions, deadline)
        if len(compiled) == len(regions):
            return [_checked(engine, region, result) for region, result in zip(regions, compiled, strict=True)]
        error: Exception = CompileError(f"{engine.name} returned {len(compiled)} results for {len(regions)} regions")
    except failures(Exception) as raised:  # against the protocol, but any engine may fail in ways not thought of
        if len(regions) > 1 and not is_sticky(raised):
            # Which one it is of is not told. What was compiled of the others the engine mostly has kept.
            return [made for region in regions for made in _compiled(engine, [region], deadline)]
        # Whoever demotes the region warns of it, in one line.
        _log.info("%s raised while it compiled %s", engine.name, regions[0].name, exc_info=raised)
        error = raised
    return [error] * len(regions)


def _checked(engine: Engine, region: Region, result: _Made) -> _Made:
    # The base first: looking for the protocol's members reads `program`, which a region may make only then.
    if isinstance(result, CompiledRegionBase | CompiledRegion | PendingRegion | Exception):
        return result
    return CompileError(
        f"{engine.name} returned an object of type {type(result).__name__} for region {region.name}; it must be a CompiledRegion "
        "(core.engine.CompiledRegionBase has the defaults) or an exception"
    )
