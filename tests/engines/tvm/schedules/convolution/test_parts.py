"""What the convolution rules share: places, and tests for padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, run_body
from tests.engines.tvm.schedules.convolution.convolutions_for_tests import Case, parts_of
from torch_hybrid_backend.engines.tvm.schedules.convolution.geometry import Axis
from torch_hybrid_backend.engines.tvm.tir.builder import Builder
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
