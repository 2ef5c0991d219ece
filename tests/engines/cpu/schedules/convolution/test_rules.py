"""The schedules that a convolution gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.cpu.schedule_runner import printer_of
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, make
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.target import Target

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (Case((1, 32, 14, 14), 32, (3, 3), padding=1, winograd=2), "winograd"),
        (Case((1, 32, 14, 14), 3, (3, 3), padding=1, winograd=4), "winograd"),  # whatever else would take it
        (Case((1, 32, 9, 20), 32, (3, 3), padding=1, groups=32), "depthwise"),
        (Case((1, 3, 9, 20), 3, (3, 3), padding=1, groups=3), "depthwise"),
        (Case((1, 32, 9, 37), 3, (3, 3), padding=1), "small_output_channels"),
        (Case((1, 32, 9, 37), 32, (3, 3), padding=1), "direct"),
        (Case((1, 32, 10, 10), 64, (3, 3), padding=1, groups=4), "direct"),
        (Case((1, 3, 9, 37), 32, (3, 3), blocked_x=False), "direct"),
    ],
)
def test_the_first_rule_that_serves_takes_the_kernel(case: Case, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rule's body is the kernel's, and no rule is asked after it."""
    bodies: dict[str, Any] = {}

    def noted(name: str, rule: Callable[[ConvParts], Any]) -> Callable[[ConvParts], Any]:
        def of(parts: ConvParts) -> Any:
            bodies[name] = rule(parts)
            return bodies[name]

        return of

    for name in ("winograd", "depthwise", "small_output_channels", "direct"):
        monkeypatch.setattr(rules, name, noted(name, getattr(rules, name)))
    kernel, _, _ = make(case, _AVX512)
    printer = printer_of(kernel)
    body = rules.emit(kernel, printer.builder, printer, _AVX512)
    assert [name for name, found in bodies.items() if found is not None] == [taken]
    assert list(bodies)[-1] == taken
    assert body.same_as(bodies[taken])
