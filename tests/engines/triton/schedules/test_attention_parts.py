"""Parts that the schedules of attention share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from torch_hybrid_backend.engines.triton.printer import Printer
from torch_hybrid_backend.engines.triton.schedules.attention_parts import Visit, padded_width, row_tile
from torch_hybrid_backend.engines.triton.source import Lines
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.attention_scores import Bounds, Visible
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.ops import const
from torch_hybrid_backend.sizes.size import symbol


class _Number(int):
    def to(self, _: object) -> int:
        return int(self)


class _Language:
    """The part of Triton's language that limits are computed with, on Python's numbers."""

    int32 = int64 = None

    @staticmethod
    def minimum(a: int, b: int) -> _Number:
        return _Number(min(a, b))

    @staticmethod
    def maximum(a: int, b: int) -> _Number:
        return _Number(max(a, b))

    @staticmethod
    def full(_: list[int], value: int, __: object) -> _Number:
        return _Number(value)

    @staticmethod
    def multiple_of(value: int, of: int) -> int:
        assert value % of == 0
        return value


def _numbers(values: Sequence[int]) -> tuple[Expr, ...]:
    return tuple(const(value, "int64") for value in values)


def _visited(extent: int, size: int, outer: Bounds, inner: Bounds, parts: int) -> list[list[tuple[int, bool]]]:
    """(first element, whether it is a whole block) of every block that a program visits, for each of the programs."""
    found = []
    for part in range(parts):
        lines = Lines()
        visit = Visit(Printer(lines, (), (), {}), Visible(outer, inner, {}), extent, "BLOCK", size)
        visit.find({})
        if parts > 1:
            visit.divide("part", parts)
        visit.loops(lambda whole, lines=lines: lines.add(f"blocks.append((start, {whole}))"))  # type: ignore[misc]
        blocks: list[tuple[int, bool]] = []
        exec("if True:\n" + lines.text, {"tl": _Language, "BLOCK": size, "part": part, "blocks": blocks})
        found.append(blocks)
    return found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("extent", [7, 8, 40, 41])
def test_every_element_that_is_seen_is_visited_once(extent: int, parts: int) -> None:
    """In blocks that begin at multiples of their size, whole ones where every element exists and satisfies the inner bounds; none beside."""
    size = 8
    limits = (-3, 0, 5, 16, 30, 50)
    for low, high, inner_low, inner_high in product((None, *limits), (None, *limits), (None, 17), (None, 25)):
        if (inner_low is not None and low is None) or (inner_high is not None and high is None):
            continue
        outer = Bounds(_numbers([] if low is None else [low]), _numbers([] if high is None else [high]))
        inner = Bounds(
            _numbers([] if inner_low is None else [inner_low]), _numbers([] if inner_high is None else [inner_high])
        )
        blocks = [block for own in _visited(extent, size, outer, inner, parts) for block in own]
        starts = [start for start, _ in blocks]
        first = 0 if low is None else max(0, low)
        last = extent - 1 if high is None else min(extent - 1, high)
        seen = range(first // size * size, last + 1, size)  # bounds that cross within a block leave it
        assert sorted(starts) == list(seen), (low, high, inner_low, inner_high)
        for start, whole in blocks:
            # Outer bounds that are no inner ones belong to conditions that are computed in whole blocks too.
            assert not whole or (
                start >= (inner_low or 0)
                and start + size <= min(extent, extent if inner_high is None else inner_high + 1)
            )
        if (low, high) == (None, None):
            assert sum(whole for _, whole in blocks) == extent // size


def test_widths() -> None:
    """A tile holds a whole head; its width must be known."""
    assert [padded_width(LoopVar("d", n)) for n in (1, 16, 72, 128)] == [16, 16, 128, 128]
    with pytest.raises(ScheduleError, match="known when it is compiled"):
        padded_width(LoopVar("d", symbol("s0", 64)))


def test_rows_of_a_tile() -> None:
    assert [row_tile(Target(90), rows, 128) for rows in (1, 17, 100, 5000)] == [16, 32, 128, 128]
    assert row_tile(INTERPRETER, 5000, 128) == 512
