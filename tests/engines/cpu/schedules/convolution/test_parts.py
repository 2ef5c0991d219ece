"""Parts that the convolution rules share: places, and tests for padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, printer_of, run_body
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, make, parts_of
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, as_index, var


@pytest.mark.parametrize(("shape", "kernel"), [((2, 24, 9), (3,)), ((2, 24, 8, 9), (3, 3))])
def test_a_place_in_two_dimensions(shape: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    """(image, channel, row, column) as the input's variables: of one dimension the row is left out."""
    parts = parts_of(Case(shape, 20, kernel))
    place = tuple(map(as_index, (1, 17, 5, 6)))
    env = parts.x_env(*place)
    assert tuple(env) == parts.kernel.x_vars
    assert tuple(env.values()) == (place if len(shape) == 4 else (place[0], place[1], place[3]))
    assert (parts.images, parts.in_channels, parts.out_channels) == (2, 24, 20)
    assert parts.rows.out == (6 if len(shape) == 4 else 1)


@pytest.mark.parametrize(("padding", "size"), [(0, 5), (2, 5), (0, 4), (0, 3), (2, 1)])
def test_what_lies_outside_is_skipped(padding: int, size: int) -> None:
    """`body` where a position exists, `other` elsewhere, on both sides of the input."""
    axis = Axis(size=size, out=5, kernel=1, stride=1, padding=padding, dilation=1)
    parts = parts_of(Case((1, 8, 5, 5), 8, (1, 1)))

    def body(builder: Builder, out: Any) -> Any:
        parts.builder = builder

        def at(i: Index) -> Any:
            position = axis.source(i, 0)
            return parts.inside(axis, position, builder.store(out, i, 1), other=builder.store(out, i, 2))

        return builder.loop(5, at)

    out = torch.zeros(5, dtype=torch.int32)
    run_body(body, out)
    assert out.tolist() == [1 if axis.inside(i, 0) else 2 for i in range(5)]


def test_what_always_exists_is_not_tested() -> None:
    """The body itself, without a branch."""
    parts = parts_of(Case((1, 8, 5, 5), 8, (1, 1)))
    axis = Axis(5, 5, 1, 1, 0, 1)
    body = parts.clear(parts.builder.local(parts.block, "float32"), as_index(0))
    assert parts.inside(axis, var("i", 5), body) is body


def test_only_blocked_inputs_are_asked_for_ahead() -> None:
    """A row-major input lies as hardware guesses; a computed one lies nowhere."""
    blocked, plain = (parts_of(Case((1, 32, 5, 9), 32, (3, 3), blocked_x=b), HOST) for b in (True, False))
    place = (as_index(0),) * 4

    def asked(parts: Any) -> Any:
        return parts.fetch(9, parts.builder.size(1) > 0, lambda i: place, lambda i: place)

    assert asked(blocked) is not None
    assert asked(plain) is None
    x = blocked.kernel.x
    blocked.kernel = dataclasses.replace(blocked.kernel, x=ops.add(x, x))
    assert asked(blocked) is None


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 16, 13, 11), 21, (1, 1), blocked_out=False, mixed=False),  # one long row, a short last block
        Case((1, 16, 7, 37), 32, (3, 3), 1, 1, blocked_out=False, mixed=False, long_epilogue=True),
        Case((1, 16, 9, 24), 32, (3, 3), 2, 1, groups=2, blocked_out=False, mixed=False),
        Case((1, 8, 61), 12, (5,), 1, 2, blocked_out=False, mixed=False),
        Case((1, 16, 8, 20), 32, (3, 3), 1, 1, blocked_out=False, mixed=False, dtype="bfloat16"),
        Case((1, 16, 9, 33), 16, (3, 3), 1, 1, groups=16, blocked_out=False, mixed=False),
    ],
)
def test_row_major_results_are_written_along_columns(case: Case, target: Target) -> None:
    """Tiles are turned before they are stored, with what is read for it: ragged channels and columns, rows of an image and one long row."""
    check(case, target)
    assert "turned" in _text(case, target)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 16, 8, 20), 32, (3, 3), 1, 1),  # channels lie together
        Case((1, 16, 8, 20), 32, (3, 3), 1, 1, blocked_out=False),  # so they do in what is added
        Case((1, 16, 8, 3), 32, (3, 3), 1, 1, blocked_out=False, mixed=False),  # hardly any columns
        Case((1, 10, 6, 20), 14, (3, 3), 1, 1, groups=2, blocked_out=False, mixed=False),  # blocks of one channel
    ],
)
def test_other_results_are_not_turned(case: Case) -> None:
    """Results are not turned where channels lie together, or a tile is too small to turn."""
    assert "turned" not in _text(case, HOST)


def _text(case: Case, target: Target) -> str:
    kernel, *_ = make(case, target)
    printer = printer_of(kernel)
    return str(rules.emit(kernel, printer.builder, printer, target))
