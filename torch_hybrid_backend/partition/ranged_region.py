"""Region that one engine runs at some sizes and another engine, or eager, at the rest.

The plan asks `Program.serves` once for each set of sizes, and then runs the program of one engine or the other. Called from Python, the region
reads sizes from shapes, on the host. Placement chooses the other engine among the candidates that it compared and priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, KernelText, Pending, PendingRegion
from torch_hybrid_backend.core.plan import Attempt
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.partition.reference import run_eager


def unserved(compiled: CompiledRegion, inputs: Sequence[torch.Tensor]) -> str:
    """Text that names the sizes of a call that a region's program does not serve; "" if it serves them all."""
    program = compiled.program
    if program is None or not program.names:
        return ""
    return program.unserved(SizeReader(program.signature, program.names).values(inputs))


@dataclass(frozen=True, slots=True, eq=False)
class RangedRegion:
    """Runs `inside` at the sizes that its program serves, and `otherwise` at other sizes. `otherwise`: None for eager. `other`: the name of the
    engine of `otherwise`."""

    region: Region
    inside: CompiledRegion
    other: str
    otherwise: CompiledRegion | None

    @property
    def program(self) -> Program | None:
        return self.inside.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not unserved(self.inside, inputs):
            return self.inside(inputs)
        return run_eager(self.region, inputs) if self.otherwise is None else self.otherwise(inputs)

    @property
    def form(self) -> str:
        return self.inside.form

    @property
    def variants(self) -> tuple[str, ...]:
        return self.inside.variants

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> CompiledRegion:
        return replace(self, inside=self.inside.with_variants(names, deadline))

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        return replace(self, inside=self.inside.refine(inputs, budget_s, deadline))

    def begun(self) -> Pending | None:
        return self.inside.begun()

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        exact = self.inside.exact(deadline, error)
        return replace(self, inside=exact) if isinstance(exact, CompiledRegion) else exact

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.inside.attempts

    @property
    def note(self) -> str:
        """The engine's note, the sizes that it serves, and the engine that runs other sizes."""
        ranges = self.inside.program.ranges if self.inside.program is not None else ()
        served = ", ".join(f"{name} from {least} to {most}" for name, least, most in ranges)
        return "; ".join(filter(None, [self.inside.note, f"it serves {served}, and {self.other} other sizes"]))

    def operator_us(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[frozenset[str], float]]:
        return () if unserved(self.inside, inputs) else self.inside.operator_us(inputs)

    def release(self) -> None:
        self.inside.release()
        if self.otherwise is not None:
            self.otherwise.release()

    def texts(self) -> Sequence[KernelText]:
        return (*self.inside.texts(), *(() if self.otherwise is None else self.otherwise.texts()))
