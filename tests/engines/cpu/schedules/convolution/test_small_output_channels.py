"""Convolutions to few output channels: which are computed so, and their results."""

from __future__ import annotations

import pytest

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, check_sizes
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.small_output_channels import small_output_channels
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt


def is_computed_for_small_output_channels(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the rule for few output channels computes the case; that its result is right is checked in any case."""
    computed = []

    def noted(parts: ConvParts) -> Stmt | None:
        body = small_output_channels(parts)
        computed.append(body is not None)
        return body

    monkeypatch.setattr(rules, "small_output_channels", noted)
    check(case, target)
    return any(computed)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 37), 3, (3, 3), padding=1),
        Case((2, 32, 11, 17), 1, (3, 3), padding=1, blocked_out=False),
        Case((1, 64, 27, 39), 2, (3, 5), 2, (0, 2), long_epilogue=True),
        Case((3, 64, 7, 13), 2, (3, 3), padding=2, dilation=2, dtype="bfloat16"),
        Case((1, 64, 41), 2, (5,), padding=2),
        Case((1, 32, 3, 3), 1, (3, 3), padding=3),  # tiles that read nothing but padding
    ],
)
def test_small_output_channels(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a vector of output channels: input channels are the lanes, whatever stride, padding, dilation and width."""
    assert is_computed_for_small_output_channels(case, target, monkeypatch)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 42, 9, 9), 2, (3, 3)),  # input channels that do not fill vectors
        Case((1, 64, 9, 9), 2, (3, 3), blocked_x=False),
        Case((1, 64, 9, 9), 16, (3, 3)),
        Case((1, 64, 2, 2), 3, (1, 1)),  # copying the weight would take longer
    ],
)
def test_small_output_channels_leaves_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that are no faster so, or cannot be read in vectors, are left to the direct rule."""
    assert not is_computed_for_small_output_channels(case, HOST, monkeypatch)


def test_sizes_known_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel serves images from a pixel on, of fewer rows than cores too."""
    case = Case((1, 32, 20, 40), 3, (3, 3), padding=1)
    assert is_computed_for_small_output_channels(case, HOST, monkeypatch)
    check_sizes(case, [(1, 1), (1, 3), (3, 2), (9, 16), (13, 29), (8, 57)])
    check_sizes(Case((1, 64, 27, 39), 2, (5, 5), 2, 2), [(1, 1), (6, 5), (20, 61)])
