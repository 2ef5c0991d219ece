"""Complex numbers made of two real values, and real ones made of them by way of conjugated and negated views, within one line."""

from __future__ import annotations

import torch

from tests.random_programs.noise import MOVE, REDUCTION, SMOOTH
from tests.random_programs.scope import Scope, Step
from tests.random_programs.vocabulary.pointwise import partner

VIEWS = """
torch.complex({0}, {1}).conj().imag | torch.complex({0}, {1}).conj().real | torch.view_as_real(torch.complex({0}, {1}))
torch.complex({0}, {1}).mH.imag | torch.view_as_complex(torch.stack(torch.broadcast_tensors({0}, {1}), -1)).conj().imag
torch.complex({0}, {1}).conj()[..., 1:].imag | torch.complex({0}, {1}).conj().resolve_conj().imag
"""
SMOOTH_ONES = """
((z := torch.complex({0}, {1}.abs() + 0.5)) * z.conj()).real.clamp(max=90) + z.abs() | ((z := torch.complex({0}, {1})) * z.mH.mT).imag
torch.complex({0}, {1}.abs() + 0.5).abs() | torch.complex({0}.clamp(-4, 4), {1}).exp().conj().imag
torch.complex({0}.abs() + 0.5, {1}).sqrt().conj().imag | ((z := torch.complex({0}, {1}.abs() + 1)) / z.conj()).imag
torch.polar({0}.abs() + 0.5, {1}).conj().real
"""
REDUCTIONS = """
torch.fft.rfft({0}).conj().imag | torch.fft.irfft(torch.fft.rfft({0}).conj(), n={0}.shape[-1]) | torch.fft.fft({0}).mH.real
((z := torch.fft.rfft({0} * 0.25) + 9j) * z.conj()).real.clamp(max=90) + z.abs() | ((z := torch.complex({0}, {1}) * 0.25) @ z.mH).imag
(z := torch.fft.rfft({0})).abs() * z.conj().imag.sign()
"""
WRITES = "{0}.copy_(torch.complex({0}, {1}).conj().imag) | {0}.neg_() | torch.complex({0}, {1}).conj().imag.neg_()"


def _choices(text: str) -> list[str]:
    return [item.strip() for line in text.strip().splitlines() for item in line.split(" | ")]


def through_complex_numbers(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: v.dtype in (torch.float32, torch.float64) and v.rank >= 1)
    if a is None:
        return None
    texts, kind = scope.draw.choose([(VIEWS, MOVE), (SMOOTH_ONES, SMOOTH), (REDUCTIONS, REDUCTION)])
    return Step(scope.draw.choose(_choices(texts)).format(a, partner(scope, a)), kind)


def writes(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: v.dtype in (torch.float32, torch.float64) and v.rank >= 1 and scope.is_writable(v))
    if a is None:
        return None
    return Step(scope.draw.choose(_choices(WRITES)).format(a, partner(scope, a)), MOVE, 0)


TEMPLATES = ((through_complex_numbers, 6), (writes, 1))
