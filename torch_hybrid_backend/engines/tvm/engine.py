"""The TVM engine: regions as kernels with our own schedules, compiled by TVM in worker processes.

Nothing here imports tvm: support is decided by the lowering table, kernels are plain data, and only the workers compile. A process that
finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.fx

from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tvm.assemble import RegionKernels, assemble
from torch_hybrid_backend.engines.tvm.compile_pool import KernelCompiler
from torch_hybrid_backend.engines.tvm.kernel_cache import compile_kernels
from torch_hybrid_backend.engines.tvm.kernel_key import engine_version, tvm_version
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.store import Store

log = logging.getLogger(__name__)


class ProgramCall(Protocol):
    """A program as a function."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def release(self) -> None: ...


RunProgram = Callable[[Program], ProgramCall]


@dataclass(slots=True)
class TvmRegion:
    """A region as a program of kernels; `run` executes it from Python."""

    program: Program
    run: ProgramCall

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    def release(self) -> None:
        """Free what running from Python holds (packed constants); a later call makes it again."""
        self.run.release()


class TvmEngine:
    """Compiles regions to CPU kernels. Owns its kernel compiler processes, which start with the first compilation."""

    name: str = "tvm"
    keeps_deadline = True

    def __init__(self, store: Store, compile_threads: int, run_program: RunProgram) -> None:
        self._store = store
        self._compiler = KernelCompiler(compile_threads)
        self._run_program = run_program
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
            self._target = Target.host()
        return self._target

    def available(self) -> Verdict:
        if importlib.util.find_spec("tvm") is None:
            return Refused(
                Reason.MISSING_DEPENDENCY, "apache-tvm is not installed: pip install 'apache-tvm>=0.27,<0.28'"
            )
        return Supported()

    def supports(self, node: torch.fx.Node) -> Verdict:
        return lowering.supports(node)

    def compile(self, regions: Sequence[Region], deadline_s: float) -> list[CompiledRegion | Exception]:
        """Lower the regions to kernels and compile those together, equal ones once."""
        start = time.monotonic()
        assembled = [self._assemble(region) for region in regions]
        kernels = [kernel for item in assembled if isinstance(item, RegionKernels) for kernel in item.kernels]
        left = max(0.0, deadline_s - (time.monotonic() - start))
        compiled = iter(compile_kernels(kernels, self.target, self._compiler, self._store, left))
        results: list[CompiledRegion | Exception] = []
        for item in assembled:
            if isinstance(item, Exception):
                results.append(item)
                continue
            mine = [next(compiled) for _ in item.kernels]
            failed = next((k for k in mine if isinstance(k, Exception)), None)
            if failed is not None:
                results.append(failed)
                continue
            program = item.program([(k.library, k.symbol) for k in mine if not isinstance(k, Exception)])
            results.append(TvmRegion(program, self._run_program(program)))
        log.info("%d regions, %d kernels in %.2f s", len(regions), len(kernels), time.monotonic() - start)
        return results

    def _assemble(self, region: Region) -> RegionKernels | Exception:
        try:
            return assemble(region, self.target)
        except lowering.Refuse as refuse:
            return CompileError(f"{region.name}: {refuse.refused.why}")
        except Exception as error:
            failure = CompileError(f"{region.name} could not be lowered: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
