"""Variants: the ways of computing what one kernel computes, best estimate first. Plain data.

The first variant is always the kernel itself. Which is fastest the engine finds out on the region's first call (`search`), unless the
placement is by estimate. Which others there are a backend says (`KernelBackend.alternatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """`kernels`, run one after the other, write what the kernel they stand for writes.

    `name` is unique among a kernel's variants and stable: verdicts are kept under it. `packed`: constants that only this variant reads.
    Between its kernels it may use buffers of its own. `is_exact`: it rounds as the kernel itself does; a region with one that is not
    falls back to those that are, where its results are too far from eager's. `is_preferred`: by estimate it is the fastest, and taken where
    nothing was timed. `cost`: its estimated time over the kernel's own. `is_probed`: it is tried only where the kernel is found slow
    (`library_probe`): it calls an operator of PyTorch's, and kernels around it, which convert operands, are compiled for it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    packed: tuple[Packed, ...] = ()
    is_exact: bool = True
    is_preferred: bool = False
    cost: float = 1.0
    is_probed: bool = False

    @property
    def compiled_kernels(self) -> int:
        """Number of kernels that are compiled for it; an operator of PyTorch's is there already."""
        return sum(not isinstance(kernel, OperatorKernel) for kernel in self.kernels)

    @property
    def calls_operator(self) -> bool:
        return self.compiled_kernels < len(self.kernels)


def variants(kernel: Kernel, alternatives: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants of a kernel: itself first, then the preferred ones of the alternatives, best estimate first, then the others in their order.

    None of the others where sizes are known only at run time: those of the call that is timed say little of those to come.
    """
    preferred = sorted((variant for variant in alternatives if variant.is_preferred), key=lambda variant: variant.cost)
    others = [variant for variant in alternatives if not variant.is_preferred]
    return Variant("", (kernel,)), *preferred, *([] if kernel_sizes(kernel) else others)
