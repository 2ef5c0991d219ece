"""A program as a function: what an engine's CompiledRegion does when it is called from Python.

It is a plan of one segment, so its kernels run on PyTorch's threads here as they do in the whole graph's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.runtime.constant_pool import release_unused
from torch_hybrid_backend.runtime.executor import Executor, GraphPlans
from torch_hybrid_backend.runtime.kept_plans import KeptPlans, Sizes
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory
from torch_hybrid_backend.runtime.plan_layout import Piece, StaticLayoutError
from torch_hybrid_backend.runtime.served_sizes import ServedSizes


class ProgramRunner:
    """Runs `program` on a region's inputs. Threads may call it at once.

    input_specs, output_specs: the region's; where they are left out, inputs and outputs have the form of their buffers.
    Constants are packed on the first call and again whenever their sources change. The plan is built on the first
    call, which raises HybridError where a kernel library or the runtime cannot be loaded; of a program whose sizes are known only at run time
    there is one for each set of sizes, as in `SymbolicExecutor`. Raises HybridError where its `signature` does not tell the sizes, and in a
    call at sizes that the program does not serve.
    """

    def __init__(
        self,
        program: Program,
        input_specs: Sequence[TensorSpec | None] | None = None,
        output_specs: Sequence[TensorSpec] | None = None,
    ) -> None:
        self._program = program
        self._input_specs = input_specs
        self._output_specs = output_specs
        self._plans: KeptPlans[Executor] = KeptPlans()
        self._reader = SizeReader(program.signature, program.names) if program.names else None
        self._laid_out: GraphPlans | None = None
        self._served: ServedSizes | None = None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """inputs: the region's, in order. Returns its outputs; raises HybridError as `Executor` does."""
        executor, tensors = self._made(inputs)
        return executor(tensors)

    def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """The microseconds that each step of the program takes in one call; raises as a call does."""
        executor, tensors = self._made(inputs)
        return executor.kernel_us(tensors)

    @property
    def arena_bytes(self) -> int:
        return sum(executor.arena_bytes for _, executor in self._plans.items())

    def _made(self, inputs: Sequence[torch.Tensor]) -> tuple[Executor, Sequence[torch.Tensor]]:
        """The executor for a call, and its inputs."""
        if self._reader is None:
            return self._plans.at((), self._build), inputs
        return self._plans.at(self._reader.read(inputs), self._build), self._tensors(inputs)

    def _tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [
            tensor for tensor, item in zip(inputs, self._program.signature, strict=True) if isinstance(item, TensorSpec)
        ]

    def release(self) -> None:
        """Frees the plans, their arenas and their packed constants; the next call makes them again."""
        self._laid_out = None
        if not self._plans.clear():
            return  # nothing to free, and the runtime may not even be there
        release_unused()  # else a variant that lost would keep its weights until the region is placed
        give_back_freed_memory()

    def _build(self, sizes: Sizes) -> Executor:
        values = {} if self._reader is None else dict(zip(self._reader.names, sizes, strict=True))
        if self._laid_out is None:
            self._laid_out = self._lay_out()
            self._served = ServedSizes([self._program], () if self._reader is None else self._reader.names)
        if self._served is not None and not all(self._served.at(sizes)):
            raise StaticLayoutError(f"a program does not serve these sizes: {self._program.unserved(values)}")
        return self._laid_out.at(values)

    def _lay_out(self) -> GraphPlans:
        """The program as a graph of one segment, without its inputs that are sizes."""
        program = self._program
        if self._reader is not None:
            program = program.reading([i for i, item in enumerate(program.signature) if isinstance(item, TensorSpec)])
        names = tuple(f"input{position}" for position in range(len(program.inputs)))
        outputs = tuple(f"output{position}" for position in range(len(program.outputs)))
        constants = {names[source] for constant in program.constants for source in constant.sources}
        input_specs = self._input_specs or tuple(
            program.buffers[buffer] if buffer >= 0 else None for buffer in program.inputs
        )
        output_specs = self._output_specs or tuple(program.buffers[buffer] for buffer in program.outputs)
        piece = Piece(names, tuple(input_specs), outputs, tuple(output_specs), program)
        return GraphPlans(names, constants, [piece], [_unreachable], outputs)


def _unreachable(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise AssertionError("a plan runs a program's kernels, never its callback")
