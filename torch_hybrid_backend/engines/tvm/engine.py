"""The TVM engine: regions as kernels with our own schedules, compiled by TVM in worker processes.

Nothing here imports tvm: support is decided by the lowering table, kernels are plain data, and only the workers compile. A process that
finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tvm.assemble import RegionKernels, assemble
from torch_hybrid_backend.engines.tvm.compile_pool import KernelCompiler
from torch_hybrid_backend.engines.tvm.kernel_cache import CompiledKernel, compile_kernels
from torch_hybrid_backend.engines.tvm.kernel_key import engine_version, kernel_key, tvm_version
from torch_hybrid_backend.engines.tvm.screen import screen
from torch_hybrid_backend.engines.tvm.search import (
    LEAST_WORK,
    Candidates,
    Options,
    ProgramCall,
    RunProgram,
    Verdicts,
    compiled_variant,
    limit,
    program_of,
    search,
)
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tune import contest, tune
from torch_hybrid_backend.engines.tvm.variants import variants, work
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.store import Store

log = logging.getLogger(__name__)


_OPERATORS_PER_KERNEL = 4  # about: fused, and equal ones once
# Of a kernel that are tried where it is not tuned, the one in use included; a third is worth 0.8 % at most (docs/performance.md).
_VARIANTS = 2
# For compiling one variant of every kernel while tuning, which no deadline ends: a compiler that hangs must not hold it up for ever.
_TUNING_ROUND_S = 600.0


@functools.cache
def _compiler(threads: int) -> KernelCompiler:
    """One for all engines of a process: starting its processes takes seconds."""
    return KernelCompiler(threads)


@dataclass(frozen=True, slots=True, eq=False)
class _Assembled:
    """A region's kernels, and what to compile of each."""

    kernels: RegionKernels
    candidates: tuple[Candidates, ...]


@dataclass(slots=True)
class TvmRegion:
    """A region as a program of kernels; `run` executes it from Python. `options`: the variants of each kernel. `deadline`: its graph's."""

    program: Program
    run: ProgramCall
    kernels: RegionKernels
    options: tuple[Options, ...]
    engine: TvmEngine
    deadline: Deadline

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    def release(self) -> None:
        """Free what running from Python holds (packed constants); a later call makes it again."""
        self.run.release()

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float) -> TvmRegion:
        """The region with the fastest variants of its kernels, timed on `inputs` for about `budget_s` seconds; those that would have to be
        compiled after the deadline are left out. Under `placement=tune` all are timed, however long that takes."""
        if not any(option.is_open or option.untried for option in self.options):
            return self
        return self.engine.refined(self, inputs, budget_s)

    def exact(self) -> TvmRegion | None:
        """The region with the variants only that round as its kernels do; None where it has no others. Compiles what is missing of them; raises
        CompileError where that fails, DeadlineError where there is no time left for it."""
        if all(option.chosen.variant.is_exact for option in self.options):
            return None
        return self.engine.exact(self)


class TvmEngine:
    """Compiles regions to CPU kernels. Owns its kernel compiler processes, which start with the first compilation."""

    name: str = "tvm"
    devices: frozenset[str] = frozenset({"cpu"})
    keeps_deadline = True

    def __init__(
        self,
        store: Store,
        compile_threads: int,
        run_program: RunProgram,
        placement: str = "estimate",
        machine: Callable[[], str] = lambda: "",
        progress: bool = False,
    ) -> None:
        """placement: the setting; it decides how many variants of each kernel are tried. machine: what timings depend on, as a text.
        progress: tell how far tuning is, on standard error."""
        self._store = store
        self._compiler = _compiler(compile_threads)
        self._run_program = run_program
        self._placement = placement
        self._machine = machine
        self._progress = progress
        self._target: Target | None = None

    @property
    def keep_ops(self) -> frozenset[torch._ops.OpOverload]:
        """Operators with a lowering of their own are wanted whole."""
        return frozenset(lowering.table())

    @property
    def version(self) -> str:
        """What timings of this engine's kernels depend on: its own sources, TVM, the target."""
        return f"{engine_version()} tvm {tvm_version()} {self.target.fingerprint}"

    @property
    def target(self) -> Target:
        if self._target is None:
            self._target = Target.host().within(torch.backends.cpu.get_cpu_capability())
        return self._target

    def available(self) -> Verdict:
        if importlib.util.find_spec("tvm") is None:
            return Refused(
                Reason.MISSING_DEPENDENCY, "apache-tvm is not installed: pip install 'apache-tvm>=0.27,<0.28'"
            )
        return Supported()

    def prepare(self, operators: int) -> None:
        """Start the kernel compiler for a graph of so many operators, without waiting for it: it needs a second to import TVM."""
        self._compiler.start(math.ceil(operators / _OPERATORS_PER_KERNEL))

    def supports(self, node: torch.fx.Node) -> Verdict:
        return lowering.supports(node)

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        """Lower the regions to kernels and compile those together, equal ones once."""
        start = time.monotonic()
        assembled = [self._assemble(region) for region in regions]
        ready = [item for item in assembled if isinstance(item, _Assembled)]
        if self._placement != "estimate":
            limit([each for item in ready for each in item.candidates])
        kernels = [k for item in ready for each in item.candidates for v in each.variants for k in v.kernels]
        made = iter(self.built(kernels, deadline))
        results = [self._compiled(item, made, deadline) if isinstance(item, _Assembled) else item for item in assembled]
        log.info("%d regions, %d kernels in %.2f s", len(regions), len(kernels), time.monotonic() - start)
        return results

    def _compiled(
        self, assembled: _Assembled, compiled: Iterator[CompiledKernel | Exception], deadline: Deadline
    ) -> CompiledRegion | Exception:
        """The region, given its kernels in the order of its candidates and their variants."""
        options = [
            Options.of(each, [[next(compiled) for _ in variant.kernels] for variant in each.variants])
            for each in assembled.candidates
        ]
        failed = next((option for option in options if isinstance(option, Exception)), None)
        return failed or self._region(assembled.kernels, [o for o in options if isinstance(o, Options)], deadline)

    def _region(self, kernels: RegionKernels, options: Sequence[Options], deadline: Deadline) -> TvmRegion:
        """A region with the chosen variants."""
        program = program_of(kernels, [option.chosen for option in options])
        return TvmRegion(program, self._run_program(program), kernels, tuple(options), self, deadline)

    def refined(self, region: TvmRegion, inputs: Sequence[torch.Tensor], budget_s: float) -> TvmRegion:
        """See `TvmRegion.refine`. What was found out is kept."""
        start = time.monotonic()
        region.release()
        verdicts = self._verdicts()
        if self._placement == "tune":
            options = tune(
                region.kernels,
                region.options,
                lambda kernels: self.built(kernels, Deadline(_TUNING_ROUND_S)),
                self._run_program,
                inputs,
                verdicts,
                progress_shown=self._progress,
            )
            return self._region(region.kernels, options, region.deadline)
        found = search(region.kernels, region.options, self._run_program, inputs, budget_s)
        options = [option.decided(found.get(option.key, {})) for option in region.options]
        if not region.deadline.is_over():
            options = screen(options)
            if any(option.untried for option in options):
                compile_more = functools.partial(self.built, deadline=region.deadline)
                options = contest(region.kernels, options, compile_more, self._run_program, inputs)
        before = {option.key: option.times for option in region.options}
        for option in {option.key: option for option in options if option.times != before[option.key]}.values():
            verdicts.put(option.key, option.times)
        log.info("variants of %d kernels timed in %.2f s", len(found), time.monotonic() - start)
        return self._region(region.kernels, options, region.deadline)

    def exact(self, region: TvmRegion) -> TvmRegion:
        """See `TvmRegion.exact`."""
        kernels = [k for option in region.options if option.missing for k in option.missing.kernels]
        made = iter(self.built(kernels, region.deadline))
        options = []
        for option in region.options:
            missing = option.missing
            found = compiled_variant(missing, [next(made) for _ in missing.kernels]) if missing else None
            if isinstance(found, Exception):
                raise found
            options.append(option.with_exact(found))
        return self._region(region.kernels, options, region.deadline)

    def built(self, kernels: Sequence[Kernel], deadline: Deadline) -> list[CompiledKernel | Exception]:
        """See `compile_kernels`; in what is left of the deadline, and at its expense."""
        with deadline.running():
            return compile_kernels(kernels, self.target, self._compiler, self._store, deadline.left_s())

    def _verdicts(self) -> Verdicts:
        return Verdicts(self._store, self._machine())

    def _candidates(self, region: RegionKernels) -> tuple[Candidates, ...]:
        """What to compile of each kernel: the variant known to be fastest, or those to find out about."""
        constants = {id(packed.buffer): packed for packed in region.packed}
        verdicts = self._verdicts()
        result = []
        for kernel in region.kernels:
            found = variants(kernel, constants, self.target)
            if self._placement == "estimate" or len(found) == 1 or kernel_sizes(kernel):
                result.append(Candidates.of("", found, {}, most=1))
                result[-1].close()  # by estimate
                continue
            key = kernel_key(kernel, self.target)
            tuned = self._placement == "tune" and work(kernel) >= LEAST_WORK
            result.append(Candidates.of(key, found, verdicts.get(key), work(kernel), most=_VARIANTS, tuned=tuned))
        return tuple(result)

    def _assemble(self, region: Region) -> _Assembled | Exception:
        try:
            kernels = assemble(region, self.target)
            return _Assembled(kernels, self._candidates(kernels))
        except lowering.Refuse as refuse:
            return CompileError(f"{region.name}: {refuse.refused.why}")
        except Exception as error:
            failure = CompileError(f"{region.name} could not be lowered: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
