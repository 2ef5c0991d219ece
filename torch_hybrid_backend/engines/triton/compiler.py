"""The kernel compiler module (`codegen/compiler.py`): a kernel to a Triton program, to a cubin, to an artifact.

Nothing here imports Triton before `load`. A kernel for the interpreter is its text; a mistake in that shows when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.core.limits import ADDRESS_ALIGNMENT, MEMORY_ALIGNMENT
from torch_hybrid_backend.engines.triton import artifact, installed
from torch_hybrid_backend.engines.triton.emit import Program, emit_kernel
from torch_hybrid_backend.engines.triton.schedules.tilings import most_shared_bytes
from torch_hybrid_backend.engines.triton.source import function_of
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.storage.sources import sources_version
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

SOURCES: tuple[str, ...] = ("core", "sizes", "loops", "codegen", "engines/triton")
SUFFIX = ".kernel"
ENVIRONMENT: Mapping[str, str] = {"TRITON_INTERPRET": "0"}


version = installed.version


def load() -> None:
    """Import Triton, where kernels are compiled for a GPU: it is asked for with the first such kernel."""


def compile_kernel(job: Job) -> None:
    """Write the kernel's artifact. Raises CompileError, or whatever Triton raises."""
    target = job.target
    assert isinstance(target, Target)
    program = emit_kernel(job.kernel, job.symbol, target)
    if target.is_interpreted:
        code = b""
        header = artifact.Header(
            program.text,
            program.name,
            program.signature,
            program.launch.constants,
            32 * program.launch.warps,
            scratch_bytes=program.scratch_bytes,
        )
    else:
        header, code = _compiled(program, target, Path(job.output) if job.assembly else None)
    artifact.write(Path(job.output), header, code)


def _compiled(program: Program, target: Target, beside: Path | None) -> tuple[artifact.Header, bytes]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with TemporaryFolder() as folder, triton.knobs.cache.scope():
        # Triton keeps what it compiles for ever, and trusts what it finds: what is kept is the store's, which is private and checked.
        triton.knobs.cache.dir = str(folder)
        function = function_of(program.text, program.name, folder)
        source = ASTSource(
            fn=function,
            signature={**program.signature, **dict.fromkeys(program.launch.constants, "constexpr")},
            constexprs=dict(program.launch.constants),
            # Every address is aligned as far as plans see to it: then threads read and write 16 bytes at once.
            attrs={
                (i,): [["tt.divisibility", ADDRESS_ALIGNMENT]]
                for i, type_ in enumerate(program.signature.values())
                if type_.startswith("*")
            },
        )
        options = {"num_warps": program.launch.warps, "num_stages": program.launch.stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    metadata = compiled.metadata
    if metadata.shared > (most := most_shared_bytes(target)):
        raise CompileError(
            f"{program.name} takes {metadata.shared} bytes of shared memory, and a program may have {most}"
        )
    if metadata.global_scratch_size % metadata.global_scratch_align or MEMORY_ALIGNMENT % metadata.global_scratch_align:
        raise CompileError(
            f"{program.name} asks for {metadata.global_scratch_size} bytes of scratch memory at multiples of {metadata.global_scratch_align},"
            f" and plans lend it at multiples of {MEMORY_ALIGNMENT}"
        )
    if beside is not None:
        beside.with_suffix(".ptx").write_text(compiled.asm["ptx"])
    header = artifact.Header(
        program.text,
        metadata.name,
        program.signature,
        program.launch.constants,
        32 * metadata.num_warps,
        metadata.shared,
        metadata.global_scratch_size,
    )
    return header, compiled.asm["cubin"]


sources_version(*SOURCES)  # now: see there
