"""The engine protocol: what a thing must do to run regions of a graph.

Engines see regions, never the whole graph; never each other; never the environment. Third parties add one through the
entry-point group `torch_hybrid_backend.engines` (the entry point loads to a callable `engine(config) -> Engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Verdict


@runtime_checkable
class CompiledRegion(Protocol):
    """A region made ready to run by one engine.

    `program` is not None where the region can be run by the C++ executor without Python; calling the compiled region does the
    same work from Python (slower; used for the first call, for checks and as the oracle of tests).
    Three optional members help placement. `release()` frees what calling it holds. `refine(inputs, budget_s)` is the region made faster by
    trying alternatives on a call's inputs. `exact()` is the region made more accurate, for where its results are too far from eager's, or
    None; a DeadlineError says that there was no time for it. What these two compile they compile inside `deadline.running()` of the deadline
    that the region was compiled under, while something of it is left.
    """

    @property
    def program(self) -> Program | None: ...

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


@runtime_checkable
class Engine(Protocol):
    """One way of running regions.

    `name`: lower case, stable, used in settings and reports.
    `devices`: types of the devices it serves ("cpu", "cuda"); empty where it serves every one. It is asked about operators and given regions
    of those alone.
    `keep_ops`: ATen operators the engine wants undecomposed.

    Optional: `prepare(operators)` is called before a graph of so many operators is traced that was never compiled before; it must not wait.
    `version` is a text: where it is equal, so are the engine's results and timings.
    """

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> frozenset[str]: ...

    @property
    def keep_ops(self) -> frozenset[torch._ops.OpOverload]: ...

    def available(self) -> Verdict:
        """Whether the engine can run in this installation; a refusal says what to install."""
        ...

    def supports(self, node: torch.fx.Node) -> Verdict:
        """Whether the engine takes one ATen node, judged by its target, arguments and `meta["val"]`."""
        ...

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        """Compile regions together (so that kernels are built in parallel and equal ones once).

        `deadline` is the graph's, and running: engines before this one may have left little of it, or nothing. An engine that is content with a
        number calls the parameter `deadline_s` and gets the seconds that are left.

        Returns, region by region, the compiled region or the exception that stopped it; never raises for a region. An engine
        that is done by the deadline whatever happens says so by an attribute `keeps_deadline = True`; it is trusted.
        """
        ...
