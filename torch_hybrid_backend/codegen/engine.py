"""An engine of kernels: regions assembled, compiled in worker processes and tuned, with the choices of one `KernelBackend`.

Nothing here imports a compiler: the lowering table decides what is supported, kernels are plain data, and only the workers compile. A process
that finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.fx

from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.codegen.backend import KernelBackend
from torch_hybrid_backend.codegen.compiler import CodeTarget, KernelCompilerModule, compiler_version
from torch_hybrid_backend.codegen.kernel_cache import Artifact, compile_kernels
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.library_probe import probe_libraries
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.search import (
    MIN_WORK,
    KernelOptions,
    compiled_variant,
    limited,
    program_of,
    search,
)
from torch_hybrid_backend.codegen.tune import try_next_variant, tune, tuner
from torch_hybrid_backend.codegen.variants import variants
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, EngineBase, KernelText, ProgramCall
from torch_hybrid_backend.core.plan import Attempt
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Verdict
from torch_hybrid_backend.errors import CompileError, failures
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.services import Services

log = logging.getLogger(__name__)


_OPERATORS_PER_KERNEL = 4  # about: fused, and equal ones once
TIMINGS = "variants"  # their kind in the cache of timings
# For compiling one variant of every kernel while tuning, which no deadline ends: a compiler that hangs must not hold it up for ever.
_TUNING_ROUND_S = 600.0


# (compiler module, threads) -> the compiler: starting its processes takes seconds.
_compilers: dict[tuple[str, int], KernelCompiler] = {}


def shared_compiler(module: KernelCompilerModule, threads: int) -> KernelCompiler:
    """The compiler that all engines of this process share that compile alike."""
    return _compilers.setdefault((module.__name__, threads), KernelCompiler(module, threads))


@dataclass(frozen=True, slots=True, eq=False)
class _Assembled:
    """A region's kernels, and what to compile of each."""

    kernels: RegionKernels
    options: tuple[KernelOptions, ...]


@dataclass(slots=True)
class KernelRegion:
    """A region as a program of kernels; `run` executes it from Python. `options`: the variants of each kernel."""

    program: Program
    run: ProgramCall
    kernels: RegionKernels
    options: tuple[KernelOptions, ...]
    engine: KernelEngine
    form: ClassVar[str] = ""
    attempts: ClassVar[tuple[Attempt, ...]] = ()
    otherwise: ClassVar[CompiledRegion | None] = None
    note: ClassVar[str] = ""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    def begun(self) -> None:
        """Nothing: it is compiled when `refine` returns."""

    def release(self) -> None:
        """Free the packed constants that running from Python holds; a later call packs them again."""
        self.run.release()

    def operator_us(self, inputs: Sequence[torch.Tensor]) -> Sequence[tuple[frozenset[str], float]]:
        """Kernel by kernel, in their variants' places."""
        times = iter(self.run.kernel_us(inputs))
        spent = [sum(next(times, math.nan) for _ in option.chosen.artifacts) for option in self.options]
        return list(zip(self.kernels.origins, spent, strict=True))

    def texts(self) -> Sequence[KernelText]:
        """The texts of the kernels; operators of PyTorch's have none."""
        chosen = [option.chosen for option in self.options]
        kernels = [kernel for each in chosen for kernel in each.variant.kernels]
        artifacts = [artifact for each in chosen for artifact in each.artifacts]
        made = zip(kernels, artifacts, self.program.steps, strict=True)
        return [
            self.kernels.backend.text(kernel, artifact, step)
            for kernel, artifact, step in made
            if not isinstance(kernel, OperatorKernel)
        ]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(option.chosen.variant.name for option in self.options)

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> KernelRegion:
        """The region with these variants of its kernels, one name each, whatever their times here."""
        return self if tuple(names) == self.variants else self.engine.with_variants(self, names, deadline)

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> KernelRegion:
        """The region with the fastest variants of its kernels, timed on `inputs` for about `budget_s` seconds; those that would have to be
        compiled after the deadline are left out. Under `placement=tune` all are timed, however long that takes."""
        if not any(option.is_open or option.untried for option in self.options):
            return self
        return self.engine.refined(self, inputs, budget_s, deadline)

    def exact(self, deadline: Deadline, error: float) -> KernelRegion | None:
        """The region with the variants only that round as its kernels do; None where it has no others. Compiles what is missing of them; raises
        CompileError where that fails, DeadlineError where there is no time left for it."""
        if all(option.chosen.variant.is_exact for option in self.options):
            return None
        return self.engine.exact(self, deadline)


class KernelEngine(EngineBase):
    """Compiles regions to kernels of a backend. Owns its kernel compiler processes, which start with the first compilation."""

    draws: bool = True  # whether its kernels can is the backend's to say: see `loops.policy.Abilities`
    keeps_deadline: bool = True

    def __init__(self, backend: KernelBackend, config: Config, services: Services) -> None:
        """The setting `placement` decides how many variants of each kernel are tried."""
        self._backend = backend
        self._services = services
        self._placement = config.placement
        self._prefers_kernels = config.prefer_kernels
        self._compiler = shared_compiler(backend.compiler, config.compile_threads)
        self.name = backend.name
        self.devices = frozenset({backend.device.type})
        self.keep_ops = frozenset(lowering.table())  # what has a lowering of its own is wanted whole

    def version(self, device: Device) -> str:
        """A key of everything that this engine's timings depend on: its compiler, with the sources, and the target."""
        return f"{compiler_version(self._backend.compiler)} {self._backend.on(device).target.fingerprint}"

    def available(self) -> Verdict:
        return self._backend.available()

    def compiles(self) -> Verdict:
        return self._backend.compiles()

    def describe(self) -> Sequence[tuple[str, str]]:
        return self._backend.describe()

    def prepare(self, operators: int) -> None:
        """Start the kernel compiler for a graph of so many operators, without waiting for it: loading a compiler takes a second."""
        self._compiler.start(math.ceil(operators / _OPERATORS_PER_KERNEL))

    def supports(self, node: torch.fx.Node) -> Verdict:
        return lowering.supports(node, self._backend.policy.abilities)

    def accepts(self, region: Region) -> Verdict:
        """Supported if kernels can be compiled for the region's device, which may differ between devices of one type."""
        return self._backend.on(region.device).available()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        """Lower the regions to kernels, and compile all kernels of a device together, equal ones once. Each device has a target of its own."""
        compiled: dict[int, CompiledRegion | Exception] = {}
        for device in dict.fromkeys(region.device for region in regions):
            own = [position for position, region in enumerate(regions) if region.device == device]
            made = self._compile_on(self._backend.on(device), [regions[position] for position in own], deadline)
            compiled.update(zip(own, made, strict=True))
        return [compiled[position] for position in range(len(regions))]

    def _compile_on(
        self, backend: KernelBackend, regions: Sequence[Region], deadline: Deadline
    ) -> list[CompiledRegion | Exception]:
        start = time.monotonic()
        assembled = [self._assemble(region, backend) for region in regions]
        ready = [item for item in assembled if isinstance(item, _Assembled)]
        options = [each for item in ready for each in item.options]
        if self._placement != "estimate":
            options = limited(options, backend.timed_variants - 1)
        kernels = [k for each in options for v in each.to_compile for k in v.kernels]
        made = iter(self.built(kernels, backend.target, deadline))
        compiled = iter([o.with_compiled([[next(made) for _ in v.kernels] for v in o.to_compile]) for o in options])
        results = [
            self._compiled(item.kernels, [next(compiled) for _ in item.options])
            if isinstance(item, _Assembled)
            else item
            for item in assembled
        ]
        log.info("%d regions, %d kernels in %.2f s", len(regions), len(kernels), time.monotonic() - start)
        return results

    def _compiled(
        self, kernels: RegionKernels, options: Sequence[KernelOptions | Exception]
    ) -> CompiledRegion | Exception:
        """The region, given each kernel's options after compilation."""
        failed = next((option for option in options if isinstance(option, Exception)), None)
        return failed or self._region(kernels, [o for o in options if isinstance(o, KernelOptions)])

    def _region(self, kernels: RegionKernels, options: Sequence[KernelOptions]) -> KernelRegion:
        """A region with the chosen variants."""
        program = program_of(kernels, [option.chosen for option in options])
        return KernelRegion(program, self._services.run_program(program), kernels, tuple(options), self)

    def refined(
        self, region: KernelRegion, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline
    ) -> KernelRegion:
        """See `KernelRegion.refine`. Times are kept on disk."""
        start = time.monotonic()
        load = OtherLoad()
        region.release()
        run_program = self._services.run_program
        backend = region.kernels.backend
        if self._placement == "tune":
            options = tune(
                region.kernels,
                region.options,
                lambda kernels: self.built(kernels, backend.target, Deadline(_TUNING_ROUND_S)),
                run_program,
                inputs,
                functools.partial(self._keep_times, backend.device),
                self._services.progress,
            )
            return self._region(region.kernels, options)
        with Progress(f"timing {len(region.options)} kernels"):
            found = search(region.kernels, region.options, run_program, inputs, budget_s)
        options = [option.decided(found.get(option.key, {})) for option in region.options]
        if not deadline.is_over():
            options = probe_libraries(options, backend.device, self._services.timer(backend.device))
            if any(option.untried for option in options):
                compile_more = functools.partial(self.built, target=backend.target, deadline=deadline)
                options = try_next_variant(region.kernels, options, compile_more, run_program, inputs)
        before = {option.key: option.times for option in region.options}
        changed = [option for option in options if option.times != before[option.key] and not option.is_partial]
        for option in {option.key: option for option in changed}.values():
            self._keep_times(backend.device, option.key, option.times, load.is_felt())
        log.info("variants of %d kernels timed in %.2f s", len(found), time.monotonic() - start)
        return self._region(region.kernels, options)

    def exact(self, region: KernelRegion, deadline: Deadline) -> KernelRegion:
        """See `KernelRegion.exact`."""
        kernels = [k for option in region.options if option.missing for k in option.missing.kernels]
        made = iter(self.built(kernels, region.kernels.backend.target, deadline))
        options = []
        for option in region.options:
            missing = option.missing
            found = compiled_variant(missing, [next(made) for _ in missing.kernels]) if missing else None
            if isinstance(found, Exception):
                raise found
            options.append(option.with_exact(found))
        return self._region(region.kernels, options)

    def with_variants(self, region: KernelRegion, names: Sequence[str], deadline: Deadline) -> KernelRegion:
        """See `KernelRegion.with_variants`."""
        if len(names) != len(region.options):
            raise CompileError(f"the region has {len(region.options)} kernels here, not {len(names)}")
        backend, kernels = region.kernels.backend, region.kernels.kernels
        constants = {packed.buffer: packed for packed in region.kernels.packed}
        options = []
        for kernel, option, name in zip(kernels, region.options, names, strict=True):
            made = next((each for each in option.compiled if each.variant.name == name), None)
            if made is None:
                found = variants(kernel, backend.alternatives(kernel, constants))
                variant = next((each for each in found if each.name == name), None)
                if variant is None:
                    raise CompileError(
                        f"a kernel has no variant {name!r} here, only {', '.join(v.name for v in found)}"
                    )
                compiled = compiled_variant(variant, self.built(variant.kernels, backend.target, deadline))
                if isinstance(compiled, Exception):
                    raise compiled
                made = compiled
            options.append(replace(option, compiled=(made,), best=0, is_open=False, untried=()))
        return self._region(region.kernels, options)

    def built(self, kernels: Sequence[Kernel], target: CodeTarget, deadline: Deadline) -> list[Artifact | Exception]:
        """See `compile_kernels`; within the time that is left of the deadline, which it uses up."""
        with deadline.running():
            store, left_s = self._services.store, deadline.left_s()
            compiler = tuner().compiler(self._compiler)
            return compile_kernels(kernels, target, compiler, store, left_s, deadline.limit_s)

    def _times(self, device: Device, kernel_key: str) -> Mapping[str, float]:
        """Microseconds by the variant's name, infinity for one that cannot run; empty if the kernel was never timed."""
        return self._services.timings.get(TIMINGS, kernel_key, device)

    def _keep_times(self, device: Device, kernel_key: str, times: Mapping[str, float], is_disturbed: bool) -> None:
        self._services.timings.put(TIMINGS, kernel_key, device, times, is_disturbed=is_disturbed)

    def _options(self, region: RegionKernels) -> tuple[KernelOptions, ...]:
        """The variants of each kernel to compile: the one known to be fastest, or those to be timed."""
        backend = region.backend
        constants = {packed.buffer: packed for packed in region.packed}
        result = []
        for kernel in region.kernels:
            alternatives = backend.alternatives(kernel, constants)
            if self._prefers_kernels:
                alternatives = [each for each in alternatives if not each.calls_operator]
            found = variants(kernel, alternatives)
            if self._placement == "estimate" or len(found) == 1 or kernel_sizes(kernel):
                result.append(KernelOptions.of("", found, {}, most=1).closed())  # by estimate
                continue
            key = kernel_key(kernel, backend.target, backend.compiler)
            tuned = self._placement == "tune" and kernel.multiply_adds >= MIN_WORK
            times = self._times(backend.device, key)
            result.append(
                KernelOptions.of(key, found, times, kernel.multiply_adds, most=backend.timed_variants, tuned=tuned)
            )
        return tuple(result)

    def _assemble(self, region: Region, backend: KernelBackend) -> _Assembled | Exception:
        try:
            kernels = assemble(region, backend)
            return _Assembled(kernels, self._options(kernels))
        except lowering.Refuse as refuse:
            return CompileError(f"{region.name}: {refuse.refused.why}")
        except failures(Exception) as error:  # a fault of ours costs one region
            failure = CompileError(f"{region.name} could not be lowered: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
