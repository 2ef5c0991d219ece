"""Probing libraries: finds kernels that an operator of PyTorch's may beat, without compiling anything.

The operator of the slowest kernel is timed alone: its tensors are warm, and no kernel converts them. Then operators of the kernels that lose
most against the best rate so far, of a kernel or an operator. A kernel within a tenth of that rate has nothing to gain; most are.
If an operator alone is faster than the kernel in its place, the kernels around the operator are compiled, and the whole is timed in the
kernel's place (`tune.try_next_variant`). Times alone are kept with the others, under the variant's name and `ALONE`; infinite if the operator
was not timed, or cannot run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_hybrid_backend.codegen.operator_kernel import Operand, OperatorKernel
from torch_hybrid_backend.codegen.search import ALONE, KernelOptions
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import failures, is_sticky
from torch_hybrid_backend.measuring.measure import Timer
from torch_hybrid_backend.sizes.size import known_int

_log = logging.getLogger(__name__)

_MIN_GAIN = 0.1  # less would be lost in converting its operands
_BUDGET_S = 0.05  # for all kernels of a region together: ResNet-50's are done in that
_ROUNDS = 3


def probe_libraries(options: Sequence[KernelOptions], device: Device, timer: Timer) -> list[KernelOptions]:
    """The options with only those operators `untried` that may win; times of operators alone are among their times."""
    known = {o.key: us for o in options if (us := o.times.get(o.chosen.variant.name)) and math.isfinite(us)}
    works = {o.key: sum(kernel.multiply_adds for kernel in o.chosen.variant.kernels) for o in options}
    asked = {o.key: o.untried[0] for o in options if o.untried and o.key in known}
    # Winograd's algorithm multiplies less: no other algorithm reaches its rate.
    best = max(
        (works[o.key] / known[o.key] for o in options if o.key in known and o.chosen.variant.is_exact), default=0
    )

    def lost_us(key: str) -> float:
        return known[key] - works[key] / best

    alone: dict[str, float] = {}
    start = time.perf_counter()
    while (left := asked.keys() - alone.keys()) and time.perf_counter() - start < _BUDGET_S:
        key = max(sorted(left), key=lost_us if alone else lambda key: known[key])
        if alone and lost_us(key) < _MIN_GAIN * known[key]:
            break
        try:
            alone[key] = operator_us(asked[key], device, timer)
        except failures(RuntimeError) as error:  # PyTorch was built without it, or it does not take such tensors
            if is_sticky(error):
                raise
            _log.info("%s cannot run: %s", asked[key].name, error)
            alone[key] = math.inf
        best = max(best, works[key] / alone[key])
    return [_probed(option, alone.get(option.key, math.inf), known.get(option.key)) for option in options]


def _probed(option: KernelOptions, alone_us: float, us: float | None) -> KernelOptions:
    """The option, given the times of its operator and its kernel; None: it could not be timed."""
    if not option.untried or us is None:
        return replace(option, untried=())
    name = option.untried[0].name
    _log.debug("%s alone takes %.1f us, the kernel %.1f us", name, alone_us, us)
    may_win = alone_us < (1 - _MIN_GAIN) * us
    return replace(option, times={**option.times, name + ALONE: alone_us}, untried=option.untried if may_win else ())


def operator_us(variant: Variant, device: Device, timer: Timer) -> float:
    """Microseconds of the variant's operator alone, the best of a few calls. Raises RuntimeError where it cannot run."""
    call = next(kernel for kernel in variant.kernels if isinstance(kernel, OperatorKernel))
    packed = {p.buffer: p for p in variant.packed}

    def made(operand: Operand) -> torch.Tensor:
        dtype = getattr(torch, operand.buffer.dtype)
        if (constant := packed.get(operand.buffer)) is not None:
            return constant.ahead(torch.ones([int(n) for n in constant.view.shape], dtype=dtype, device=str(device)))
        shape, strides = ([known_int(size) for size in sizes] for sizes in (operand.shape, operand.strides))
        return torch.empty_strided(shape, strides, dtype=dtype, device=str(device)).fill_(1.0)

    with torch.no_grad():
        arguments = [made(a) if isinstance(a, Operand) else a for a in call.arguments]
        namespace, name = call.name.split("::")
        operator = getattr(getattr(torch.ops, namespace), name).default
        operator(*arguments)  # oneDNN, say, makes a kernel on the first
        return min(timer.round([lambda: operator(*arguments)] * _ROUNDS)) / 1e3
