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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import CompiledRegion, EngineBase, ProgramCall
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
    compiled_variant,
    limit,
    program_of,
    search,
)
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.linker import LINKERS, find_linker
from torch_hybrid_backend.engines.tvm.tune import contest, tune
from torch_hybrid_backend.engines.tvm.variants import variants, work
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.services import Services

log = logging.getLogger(__name__)


_OPERATORS_PER_KERNEL = 4  # about: fused, and equal ones once
# Of a kernel that are tried where it is not tuned, the one in use included; a third is worth 0.8 % at most (docs/performance.md).
_VARIANTS = 2
_TIMINGS = "variants"  # their kind in the cache of timings
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
    """A region as a program of kernels; `run` executes it from Python. `options`: the variants of each kernel."""

    program: Program
    run: ProgramCall
    kernels: RegionKernels
    options: tuple[Options, ...]
    engine: TvmEngine

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    def release(self) -> None:
        """Free what running from Python holds (packed constants); a later call makes it again."""
        self.run.release()

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> TvmRegion:
        """The region with the fastest variants of its kernels, timed on `inputs` for about `budget_s` seconds; those that would have to be
        compiled after the deadline are left out. Under `placement=tune` all are timed, however long that takes."""
        if not any(option.is_open or option.untried for option in self.options):
            return self
        return self.engine.refined(self, inputs, budget_s, deadline)

    def exact(self, deadline: Deadline) -> TvmRegion | None:
        """The region with the variants only that round as its kernels do; None where it has no others. Compiles what is missing of them; raises
        CompileError where that fails, DeadlineError where there is no time left for it."""
        if all(option.chosen.variant.is_exact for option in self.options):
            return None
        return self.engine.exact(self, deadline)


class TvmEngine(EngineBase):
    """Compiles regions to CPU kernels. Owns its kernel compiler processes, which start with the first compilation."""

    name: str = "tvm"
    devices: frozenset[str] = frozenset({"cpu"})
    keeps_deadline: bool = True

    def __init__(self, config: Config, services: Services) -> None:
        """The setting `placement` decides how many variants of each kernel are tried."""
        self._services = services
        self._placement = config.placement
        self._compiler = _compiler(config.compile_threads)
        self._target: Target | None = None
        self.keep_ops = frozenset(lowering.table())  # what has a lowering of its own is wanted whole

    def version(self, device: Device) -> str:
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

    def describe(self) -> Sequence[tuple[str, str]]:
        """TVM, what kernels are compiled for and by how many processes, and what links them."""
        target = self.target
        caches = f"{target.l1_bytes >> 10} KiB and {target.l2_bytes >> 10} KiB of cache each"
        return (
            ("tvm", tvm_version() or "not installed"),
            ("target", f"{target.lanes} lanes of float32, {target.cores} cores with {caches}"),
            ("linker", find_linker() or "none; kernels need one of " + ", ".join(LINKERS)),
        )

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
        results = [self._compiled(item, made) if isinstance(item, _Assembled) else item for item in assembled]
        log.info("%d regions, %d kernels in %.2f s", len(regions), len(kernels), time.monotonic() - start)
        return results

    def _compiled(
        self, assembled: _Assembled, compiled: Iterator[CompiledKernel | Exception]
    ) -> CompiledRegion | Exception:
        """The region, given its kernels in the order of its candidates and their variants."""
        options = [
            Options.of(each, [[next(compiled) for _ in variant.kernels] for variant in each.variants])
            for each in assembled.candidates
        ]
        failed = next((option for option in options if isinstance(option, Exception)), None)
        return failed or self._region(assembled.kernels, [o for o in options if isinstance(o, Options)])

    def _region(self, kernels: RegionKernels, options: Sequence[Options]) -> TvmRegion:
        """A region with the chosen variants."""
        program = program_of(kernels, [option.chosen for option in options])
        return TvmRegion(program, self._services.run_program(program), kernels, tuple(options), self)

    def refined(
        self, region: TvmRegion, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline
    ) -> TvmRegion:
        """See `TvmRegion.refine`. What was found out is kept."""
        start = time.monotonic()
        region.release()
        run_program = self._services.run_program
        if self._placement == "tune":
            options = tune(
                region.kernels,
                region.options,
                lambda kernels: self.built(kernels, Deadline(_TUNING_ROUND_S)),
                run_program,
                inputs,
                self._keep_times,
                self._services.progress,
            )
            return self._region(region.kernels, options)
        found = search(region.kernels, region.options, run_program, inputs, budget_s)
        options = [option.decided(found.get(option.key, {})) for option in region.options]
        if not deadline.is_over():
            options = screen(options, self._services.timer(CPU))
            if any(option.untried for option in options):
                compile_more = functools.partial(self.built, deadline=deadline)
                options = contest(region.kernels, options, compile_more, run_program, inputs)
        before = {option.key: option.times for option in region.options}
        for option in {option.key: option for option in options if option.times != before[option.key]}.values():
            self._keep_times(option.key, option.times)
        log.info("variants of %d kernels timed in %.2f s", len(found), time.monotonic() - start)
        return self._region(region.kernels, options)

    def exact(self, region: TvmRegion, deadline: Deadline) -> TvmRegion:
        """See `TvmRegion.exact`."""
        kernels = [k for option in region.options if option.missing for k in option.missing.kernels]
        made = iter(self.built(kernels, deadline))
        options = []
        for option in region.options:
            missing = option.missing
            found = compiled_variant(missing, [next(made) for _ in missing.kernels]) if missing else None
            if isinstance(found, Exception):
                raise found
            options.append(option.with_exact(found))
        return self._region(region.kernels, options)

    def built(self, kernels: Sequence[Kernel], deadline: Deadline) -> list[CompiledKernel | Exception]:
        """See `compile_kernels`; in what is left of the deadline, and at its expense."""
        with deadline.running():
            return compile_kernels(kernels, self.target, self._compiler, self._services.store, deadline.left_s())

    def _times(self, kernel_key: str) -> Mapping[str, float]:
        """Microseconds by the name of the variant, infinity for one that cannot run; empty where the kernel was never timed."""
        return self._services.timings.get(_TIMINGS, kernel_key, CPU)

    def _keep_times(self, kernel_key: str, times: Mapping[str, float]) -> None:
        self._services.timings.put(_TIMINGS, kernel_key, CPU, times)

    def _candidates(self, region: RegionKernels) -> tuple[Candidates, ...]:
        """What to compile of each kernel: the variant known to be fastest, or those to find out about."""
        constants = {id(packed.buffer): packed for packed in region.packed}
        result = []
        for kernel in region.kernels:
            found = variants(kernel, constants, self.target)
            if self._placement == "estimate" or len(found) == 1 or kernel_sizes(kernel):
                result.append(Candidates.of("", found, {}, most=1))
                result[-1].close()  # by estimate
                continue
            key = kernel_key(kernel, self.target)
            tuned = self._placement == "tune" and work(kernel) >= LEAST_WORK
            result.append(Candidates.of(key, found, self._times(key), work(kernel), most=_VARIANTS, tuned=tuned))
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
