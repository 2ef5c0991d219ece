"""Compiled regions with a wrapper around each call: it marks the engine's errors (`reported`), or compares results with eager's (`checked`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, KernelText, Pending, PendingRegion
from torch_hybrid_backend.core.plan import Attempt
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.errors import HybridError, failures, is_sticky
from torch_hybrid_backend.partition.accuracy import compare
from torch_hybrid_backend.partition.fallback import demote, run_refusal
from torch_hybrid_backend.partition.reference import reference, replay_of, run_eager

# Runs a compiled region on its inputs, in order, and returns its outputs, in order.
Around = Callable[[CompiledRegion, Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class WrappedRegion:
    """A compiled region whose calls go through `around`, from Python, even if it has a program."""

    compiled: CompiledRegion
    around: Around
    program: ClassVar[Program | None] = None
    otherwise: ClassVar[CompiledRegion | None] = None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.around(self.compiled, inputs)

    @property
    def form(self) -> str:
        return self.compiled.form

    @property
    def variants(self) -> tuple[str, ...]:
        return self.compiled.variants

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> CompiledRegion:
        return replace(self, compiled=self.compiled.with_variants(names, deadline))

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        return replace(self, compiled=self.compiled.refine(inputs, budget_s, deadline))

    def begun(self) -> Pending | None:
        return self.compiled.begun()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.compiled.attempts

    @property
    def note(self) -> str:
        return self.compiled.note

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        exact = self.compiled.exact(deadline, error)
        return replace(self, compiled=exact) if isinstance(exact, CompiledRegion) else exact

    def operator_us(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[frozenset[str], float]]:
        return self.compiled.operator_us(inputs)

    def release(self) -> None:
        self.compiled.release()

    def texts(self) -> Sequence[KernelText]:
        return self.compiled.texts()


def reported(compiled: CompiledRegion) -> CompiledRegion:
    """The region with its errors raised as HybridError, so that they are told from errors of eager operators, which are the user's.

    An error that leaves a device unusable is raised unchanged."""
    return WrappedRegion(compiled, _reported)


def _reported(compiled: CompiledRegion, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return compiled(inputs)
    except HybridError:
        raise
    except failures(Exception) as error:  # an engine's code may fail in any way
        if is_sticky(error):
            raise
        raise HybridError(run_refusal(error).why) from error


def checked(region: Region, engine: str, compiled: CompiledRegion, *, strict: bool) -> CompiledRegion:
    """The region, compared with eager in every call (`verify=always`). A call returns eager's outputs, if eager can run the region.

    The first failure is reported (RegionError under `strict`). From then on only eager runs.
    """
    return WrappedRegion(compiled, _Check(region, engine, strict))


class _Check:
    def __init__(self, region: Region, engine: str, strict: bool) -> None:
        self._region = region
        self._engine = engine
        self._strict = strict
        self._failed: CompiledRegion | None = None

    def __call__(self, compiled: CompiledRegion, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if compiled is self._failed:
            return run_eager(self._region, inputs)
        replay = replay_of(self._region)
        expected = replay.run(lambda: reference(self._region, inputs))
        if isinstance(expected, Refused):
            return replay.run(lambda: list(compiled(inputs)))
        cause: Exception | None = None
        try:
            results = replay.run(lambda: list(compiled(inputs)))
            refused = compare(self._region, inputs, expected, results, replay).refused
        except failures(Exception) as error:  # an engine's kernels or code may fail in any way
            refused, cause = run_refusal(error), error
        if refused is not None:
            self._failed = compiled
            demote(self._region, self._engine, refused, strict=self._strict, cause=cause)
            compiled.release()
        replay.finish()
        return expected
