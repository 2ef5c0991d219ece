"""A budget for packed weights: variants whose weights take more memory than the kernel's own are used where they gain most.

kernel 1: Winograd -300 us, +6 MiB      kernel 2: Winograd -100 us, +1 MiB      kernel 3: Winograd -20 us, +9 MiB
budget 8 MiB: kernels 2 and 1, in the order of time gained per byte; kernel 3 sums directly
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.sizes.size import size_hint

# Under the default budget, what a model may take at least: less does not show in a process that has torch. ResNet-50 loses nothing to this
# default; packed weights of VGG-19 take 136 MiB instead of 304, and its calls 1.13 times as long (2-core Zen 5, batch 1).
_FREE_BYTES = 32 << 20
# Where nothing was timed, estimates of kernels are compared by this rate: about what two cores do.
_MULTIPLY_ADDS_PER_US = 1e5


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A kernel's variants, the kernel itself first, and which is the fastest. `times`: microseconds by name, as far as they are known. `work`:
    multiply-adds of the kernel."""

    variants: Sequence[Variant]
    fastest: Variant
    times: Mapping[str, float]
    work: float

    def microseconds(self, variant: Variant) -> float:
        """The time of a variant, by estimate if it was not taken."""
        if variant.name in self.times:
            return self.times[variant.name]
        reference = self.times.get(self.fastest.name, self.work / _MULTIPLY_ADDS_PER_US * self.fastest.cost)
        return reference * variant.cost / self.fastest.cost


def within_budget(choices: Sequence[Choice], packed: Sequence[Packed], budget: float | None) -> list[Variant]:
    """The variant of each kernel: the fastest, as long as all weights together exceed the kernels' own by at most `budget` times the bytes
    that these are packed from. Kernels that gain more time per byte come first; the others have the fastest variant that still fits.

    packed: the weights of the kernels themselves. budget: None for the default, as many bytes or 32 MiB.
    """
    chosen = [choice.fastest for choice in choices]
    own = {each.buffer: each for each in packed}
    weights = sum(map(_bytes, {each.source for each in packed}))
    left: float = max(weights, _FREE_BYTES) if budget is None else weights * budget if weights else 0
    there: set[object] = set()  # that a kernel has which comes before

    def added(choice: Choice, variant: Variant) -> float:
        """Bytes that a variant's weights take beyond the kernel's own."""
        new = sum(size for key, size in _weights(variant, own).items() if key not in there)
        return new - sum(_weights(choice.variants[0], own).values())

    def gain(choice: Choice) -> float:
        return choice.microseconds(choice.variants[0]) - choice.microseconds(choice.fastest)

    larger = [position for position, choice in enumerate(choices) if added(choice, choice.fastest) > 0]
    larger.sort(key=lambda position: -gain(choices[position]) / added(choices[position], chosen[position]))
    for position in larger:
        choice = choices[position]
        for variant in sorted(choice.variants, key=choice.microseconds):
            taken = max(0.0, added(choice, variant))
            if taken <= left:
                left -= taken
                there |= _weights(variant, own).keys()
                chosen[position] = variant
                break
    return chosen


def _weights(variant: Variant, own: Mapping[Buffer, Packed]) -> dict[object, int]:
    """Bytes of the packed weights that a variant reads; equal ones have equal keys."""
    known = {**own, **{each.buffer: each for each in variant.packed}}
    read = {argument.buffer for kernel in variant.kernels for argument in kernel.reads}
    return {known[buffer].made_of: _bytes(buffer) for buffer in read if buffer in known}


def _bytes(buffer: Buffer) -> int:
    dtype: torch.dtype = getattr(torch, buffer.dtype)
    return math.prod(map(size_hint, buffer.shape)) * dtype.itemsize
