"""The engine protocol: what a thing must do to run regions of a graph.

Every member is declared here and asked for by name; none is optional. `EngineBase` and `CompiledRegionBase` have defaults for all but the
essential ones, so that an engine is short:

    class Mine(EngineBase):
        name = "mine"
        def supports(self, node): ...
        def compile(self, regions, deadline): ...

Engines see regions, never the whole graph; never each other; never the environment. Third parties add one through the
entry-point group `torch_hybrid_backend.engines`: the entry point names a callable `engine(config, services) -> Engine` (`services.py`).
`examples/third_party_engine/` is a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.plan import Attempt
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Supported, Verdict
from torch_hybrid_backend.torch_private import OpOverload

# The engine that is PyTorch itself: always there, last in order, and it takes everything.
EAGER = "eager"


class ProgramCall(Protocol):
    """A program as a function of the region's inputs. It raises HybridError where it cannot run."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """The microseconds that each kernel of the program takes in one call."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Memory for intermediate values that it keeps between calls; 0 before the first."""
        ...

    def release(self) -> None:
        """Free what calling it holds; a later call makes it again."""
        ...


RunProgram = Callable[[Program], ProgramCall]


@dataclass(frozen=True, slots=True)
class KernelText:
    """A region's kernel for people to read: its `name` in the plan, its `text`, and the `suffix` of a file that holds it (".py")."""

    name: str
    text: str
    suffix: str


@runtime_checkable
class Pending(Protocol):
    """Something that is being built for an engine elsewhere, in a process of its own."""

    @property
    def done(self) -> bool:
        """True if it is built, or will never be."""
        ...

    def when_done(self, call: Callable[[], None]) -> None:
        """Call it once when it is done, in any thread; at once where it is done already. What is called does not wait."""
        ...

    def cancel(self) -> None:
        """Nobody wants it any more."""
        ...


@runtime_checkable
class CompiledRegion(Protocol):
    """A region made ready to run by one engine."""

    @property
    def program(self) -> Program | None:
        """The program that the C++ executor runs without Python; None if the region is called."""
        ...

    @property
    def otherwise(self) -> CompiledRegion | None:
        """Fallback for sizes outside the program's `ranges`; None if that is eager's operators."""
        ...

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The region's outputs, in order, for its inputs, in order. Of a region with a program the same work from Python: slower, used for the
        first call, for checks and as the oracle of tests."""
        ...

    @property
    def form(self) -> str:
        """Variant name, part of the key of timings; "" if the engine has one variant."""
        ...

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants of its kernels, by which another process makes the same region; nothing if the engine has no choice."""
        ...

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> CompiledRegion:
        """The region with the variants of these names, as another process chose them. Compiles as `refine` does; raises CompileError where that
        fails, or where it has no such variants, DeadlineError where there is no time for it."""
        ...

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        """The region made faster by timing alternatives on a call's inputs for about `budget_s` seconds, or itself. What it compiles for
        that it compiles inside `deadline.running()`, while something of the deadline is left."""
        ...

    def begun(self) -> Pending | None:
        """Builds that `refine` has begun elsewhere, told once: when it is done the region's engines are tried again, on a later call's
        inputs and off the call, and `refine` finds it."""
        ...

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        """The region made more accurate, for where its results are too far from eager's; None where that cannot be. `error`: how far, as root
        mean square of the difference over that of eager's results; NaN or infinity where some are no numbers. Compiles as `refine` does, or
        elsewhere; raises CompileError where that fails, DeadlineError where there is no time for it."""
        ...

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The ways in which it was computed before, each with what was wrong with it, and last the one that this is; nothing where this is the
        first."""
        ...

    @property
    def note(self) -> str:
        """Note of its engine for reports, in one line, such as why it has this form; "" of most."""
        ...

    def operator_us(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[frozenset[str], float]]:
        """Microseconds of one call, part by part, each with names of nodes that it computes; nothing if the engine cannot tell.

        Of values that stay in a part, not all are named."""
        ...

    def release(self) -> None:
        """Free what calling it from Python holds (packed constants, say); a later call makes it again."""
        ...

    def texts(self) -> Sequence[KernelText]:
        """The kernels that it runs, in order, as their engine can show them; none where it has no text. It may take seconds."""
        ...


@runtime_checkable
class PendingRegion(Pending, Protocol):
    """A region that its engine is building elsewhere, in a process of its own: others run it until it is ready.

    Then the region's engines are tried again, on a later call's inputs and off the call, with what was built among them.
    """

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Those of the region that it will be."""
        ...

    def result(self) -> CompiledRegion:
        """The region that was built, once `done`. Raises the error that stopped the build."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A way of running regions."""

    @property
    def name(self) -> str:
        """Lower case, stable, used in settings and reports; an entry point's engine has the entry point's name."""
        ...

    @property
    def devices(self) -> frozenset[str]:
        """The types of the devices that it serves ("cpu", "cuda"); empty: every one. It sees operators and regions of those alone."""
        ...

    @property
    def keep_ops(self) -> frozenset[OpOverload]:
        """ATen operators that it wants undecomposed."""
        ...

    @property
    def draws(self) -> bool:
        """True if it is asked about operators that draw random numbers. A region of its that holds some draws the numbers that eager would,
        from the default generator of the region's device, and leaves that as eager would."""
        ...

    @property
    def keeps_deadline(self) -> bool:
        """True if `compile` is done by its deadline, whatever happens. It is trusted: one that says so is called in the main thread."""
        ...

    def available(self) -> Verdict:
        """Supported if the engine can run in this installation; a refusal says what to install."""
        ...

    def compiles(self) -> Verdict:
        """Supported if an available engine can compile what was never compiled before; a refusal says what to install.

        The engine takes regions all the same, for what is kept on disk; `hybrid doctor` asks."""
        ...

    def version(self, device: Device) -> str:
        """Key of all that results and timings on a device depend on; "" if timings are not to be kept."""
        ...

    def describe(self) -> Sequence[tuple[str, str]]:
        """Names and values that `hybrid doctor` prints of the engine, one line each."""
        ...

    def prepare(self, operators: int) -> None:
        """Called before a graph of so many operators is traced that was never compiled before; it must not wait."""
        ...

    def keeps_packed(self, weights: torch.fx.Node) -> bool:
        """True if its kernels read weights packed that the node looks up in a codebook, for products; others are made ahead of calls."""
        ...

    def link(self, libraries: Sequence[str]) -> LinkedLibrary | None:
        """A library of all kernels in these libraries, which `KernelCall` steps of its programs name; None if the engine cannot link them.

        Raises CompileError where linking fails."""
        ...

    def supports(self, node: torch.fx.Node) -> Verdict:
        """Supported if the engine takes one ATen node, judged by its target, arguments and `meta["val"]`."""
        ...

    def accepts(self, region: Region) -> Verdict:
        """Supported if the engine takes a whole region of operators that it supports.

        A region may be too small for the engine, or its sizes too little known. The engine is asked before anything is compiled. A refusal is
        in the plan."""
        ...

    def reads(self, spec: TensorSpec) -> TensorSpec:
        """The dtype, strides and device in which its kernels read a value of this spec. Where that is another form, the compiled region copies
        the value; estimates count the copy."""
        ...

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        """Compile regions together (so that kernels are built in parallel and equal ones once).

        `deadline` is the graph's, and running: engines before this one may have left little of it, or nothing. Returns, region by region, the
        compiled region, one that is being built elsewhere, or the exception that stopped it; never raises for a region.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinkedLibrary:
    """A library of many kernels, and the machines that it is for: those with the system and processor of `uname`, and all the features, by the
    names of /proc/cpuinfo."""

    code: bytes
    system: str
    processor: str
    features: tuple[str, ...]


def serves(engine: Engine, device: Device) -> bool:
    """True if the engine serves the device."""
    return not engine.devices or device.type in engine.devices


class CompiledRegionBase(ABC):
    """A compiled region that is called from Python, has no other form and holds nothing; a subclass says what a call does."""

    program: Program | None = None
    otherwise: CompiledRegion | None = None
    form: str = ""
    attempts: tuple[Attempt, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        return ""

    @abstractmethod
    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> CompiledRegion:
        return self

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        return self

    def begun(self) -> Pending | None:
        return None

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        return None

    def operator_us(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[frozenset[str], float]]:
        return ()

    def release(self) -> None:  # noqa: B027
        """Do nothing: the region holds nothing."""

    def texts(self) -> Sequence[KernelText]:
        return ()


class EngineBase(ABC):
    """An engine for the CPU that can run anywhere, keeps no operator whole and takes every region of what it supports.

    It is not asked about random numbers, and reads no codebooks. Its timings are not kept between processes: it has no version. It is not
    trusted with deadlines: it compiles in a thread of its own.
    """

    name: str
    devices: frozenset[str] = frozenset({"cpu"})
    keep_ops: frozenset[OpOverload] = frozenset()
    draws: bool = False
    keeps_deadline: bool = False

    def available(self) -> Verdict:
        return Supported()

    def compiles(self) -> Verdict:
        return Supported()

    def version(self, device: Device) -> str:
        return ""

    def describe(self) -> Sequence[tuple[str, str]]:
        return ()

    def prepare(self, operators: int) -> None:  # noqa: B027
        """There is nothing to get ready."""

    def keeps_packed(self, weights: torch.fx.Node) -> bool:
        return False

    def link(self, libraries: Sequence[str]) -> LinkedLibrary | None:
        return None

    @abstractmethod
    def supports(self, node: torch.fx.Node) -> Verdict: ...

    def accepts(self, region: Region) -> Verdict:
        return Supported()

    def reads(self, spec: TensorSpec) -> TensorSpec:
        return spec

    @abstractmethod
    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]: ...
