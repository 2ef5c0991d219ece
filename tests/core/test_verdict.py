"""Verdicts read as conditions, and their codes never change."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported

# Codes that users' logs, caches and scripts may hold. Add to them; never rename or drop one.
PUBLISHED = {
    "accuracy",
    "argument",
    "compile_failed",
    "compiler_crashed",
    "deadline",
    "device",
    "disabled",
    "dtype",
    "layout",
    "missing_dependency",
    "not_a_tensor",
    "not_profitable",
    "out_of_memory",
    "runtime_error",
    "symbolic_shape",
    "too_small",
    "unknown_operator",
}


def test_codes_are_stable() -> None:
    """Every code that was ever published is there, written as it was, and is read back from its text."""
    assert {str(reason) for reason in Reason} >= PUBLISHED
    for code in PUBLISHED:
        assert Reason(code) is Reason[code.upper()]
        assert f"{Reason(code)}" == code
    with pytest.raises(ValueError, match="unheard_of"):
        Reason("unheard_of")


def test_a_verdict_is_a_condition() -> None:
    """A verdict is true or false: `if engine.supports(node)` means what it says, whatever the refusal's code and sentence."""
    assert Supported()
    assert not any(Refused(reason, why) for reason in Reason for why in ("", "x is sparse"))


def test_equal_verdicts_are_one() -> None:
    """Verdicts of equal content count as one where they are collected, and differ by code and by sentence."""
    first = Refused(Reason.DTYPE, "no int4")
    assert len({first, Refused(Reason.DTYPE, "no int4"), Supported(), Supported()}) == 2
    assert first != Refused(Reason.DTYPE, "no int2")
    assert first != Refused(Reason.LAYOUT, "no int4")
