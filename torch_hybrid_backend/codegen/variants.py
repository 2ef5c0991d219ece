"""Variants: different ways to compute the result of one kernel, best estimate first. Plain data.

The first variant is always the kernel itself; the backend lists the others (`KernelBackend.alternatives`). The engine times them on the
region's first call (`search`), unless the placement is by estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """`kernels`, run one after the other, write the same buffers as the kernel that they replace. They may use buffers of their own.

    `name`: unique among a kernel's variants, and stable, for times are kept under it. `packed`: constants that only this variant reads.
    `is_exact`: the variant rounds as the kernel itself does. If a region's results are too far from eager's, the region falls back to exact
    variants. `is_preferred`: the fastest by estimate, used without times. `cost`: the estimated time over the kernel's own. `is_probed`: tried
    only if the kernel is slow (`library_probe`): the variant calls an operator of PyTorch's, and needs kernels around it that convert operands.
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
        """Number of kernels to compile for the variant; an operator of PyTorch's needs none."""
        return sum(not isinstance(kernel, OperatorKernel) for kernel in self.kernels)

    @property
    def calls_operator(self) -> bool:
        return self.compiled_kernels < len(self.kernels)


def variants(kernel: Kernel, alternatives: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants of a kernel: itself, then the preferred alternatives, best estimate first, then the others in their order.

    The kernel alone if sizes are known only at run time: times of one call say little about calls with other sizes.
    """
    preferred = sorted((variant for variant in alternatives if variant.is_preferred), key=lambda variant: variant.cost)
    others = [variant for variant in alternatives if not variant.is_preferred]
    return Variant("", (kernel,)), *preferred, *([] if kernel_sizes(kernel) else others)
