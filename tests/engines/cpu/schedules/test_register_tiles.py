"""Register tiles: their sums, and how rows are cut into tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    RegisterTile,
    by_height,
    by_part,
    has_long_epilogue,
    lanes_of,
    partials,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import split_into
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.sizes.size import ceil_div, symbol


@pytest.mark.parametrize(("lanes", "dtype", "found"), [(16, "float32", 16), (16, "float64", 8), (8, "bfloat16", 8)])
def test_lanes_of_a_dtype(lanes: int, dtype: str, found: int) -> None:
    """Half types are computed in float32; float64 takes twice the room."""
    assert lanes_of(Target("x", "x", (), lanes, 1, 1 << 15, 1 << 18), dtype) == found


def test_long_epilogues() -> None:
    """More than four operations, over all stores together."""
    out = Buffer((1,), "float32")

    def store(operations: int) -> Store:
        value = ops.const(1.5, "float32")
        for _ in range(operations):
            value = ops.call("exp", value)
        return Store(out, (as_index(0),), value)

    assert not has_long_epilogue([store(4)])
    assert has_long_epilogue([store(5)])
    assert has_long_epilogue([store(3), store(2)])


@pytest.mark.parametrize("parts", [1, 3, 4, 10])
def test_parts_of_two_sizes(parts: int) -> None:
    """Each part gets its start and its size; together they cover everything once."""
    split = split_into(10, parts)

    def body(builder: Builder, out: Any) -> Any:
        def one(start: Index, size: int) -> Any:
            add = builder.loop(size, lambda i: builder.store(out, start + i, builder.load(out, start + i) + size))
            return builder.seq(add)

        return builder.loop(parts, lambda part: by_part(builder, split, part, one))

    out = torch.zeros(10, dtype=torch.int32)
    run_body(body, out)
    assert out.tolist() == [size for _, count, size in split.runs() for _ in range(count * size)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 11, 13, 14, 15, 22, 28, 29, 33])
def test_one_height_serves_a_number_of_rows_known_at_run_time(rows: int) -> None:
    """The variant that runs is no taller than there are rows; its tiles cover every row and no other, and compute few of them twice."""
    total = symbol("rows")

    def body(builder: Builder, computed: Any, heights: Any) -> Any:
        def variant(height: int) -> Any:
            def tile(part: Index) -> Any:
                start, bind = tile_start(builder, total, height, part)
                count = builder.loop(
                    height, lambda i: builder.store(computed, start + i, builder.load(computed, start + i) + 1)
                )
                return builder.seq(bind, count)

            note = builder.store(heights, height, builder.load(heights, height) + 1)
            return builder.seq(note, builder.loop(ceil_div(total, height), tile))

        return by_height(builder, total, 14, 2, variant)

    computed, heights = torch.zeros(40, dtype=torch.int32), torch.zeros(15, dtype=torch.int32)
    run_body(body, computed, heights, rows=rows)
    assert (computed[:rows] >= 1).all()
    assert not computed[rows:].any()
    assert heights.sum() == 1
    if rows >= 14:
        assert computed.sum() == min(-(-rows // height) * height for height in (8, 11, 14))


def test_partials_keep_their_numbers() -> None:
    """Each is of its own number, not of the last."""
    assert [of(as_index(5)) for of in partials(lambda number, lane: (number, lane), 3)] == [
        (0, as_index(5)),
        (1, as_index(5)),
        (2, as_index(5)),
    ]


@pytest.mark.parametrize(
    ("accumulators", "steps", "ways"), [(8, 1000, 1), (4, 1000, 2), (2, 1000, 4), (1, 1000, 4), (1, 20, 2), (1, 8, 1)]
)
def test_copies_hide_the_latency_where_there_are_steps_enough(accumulators: int, steps: int, ways: int) -> None:
    """Eight multiply-adds in flight, in at most four copies, each of at least eight steps."""
    assert RegisterTile.ways_for(accumulators, steps) == ways


@pytest.mark.parametrize("by_element", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 4, 7, 33])
def test_a_tile_sums_products(depth: int, ways: int, by_element: bool) -> None:
    """acc[row, vector, lane] = sum over k of a[row, k] * b[k, vector, lane], in any number of copies, scalars loaded one by one or as vectors
    of steps; a row left out stays zero."""
    rows, vectors, lanes = 3, 2, 4
    width = vectors * lanes

    def body(builder: Builder, a: Any, b: Any, out: Any) -> Any:
        printer = Printer(builder, {})
        tile = RegisterTile(builder, printer, rows, vectors, lanes, "float32", ways, by_element=by_element)

        def add(k: Index, scalars: Any, way: int) -> Any:
            def right(vector: int, lane: Index) -> Any:
                return builder.load(b, k * width + vector * lanes + lane)

            return tile.accumulate(
                [None if row == 1 else s for row, s in enumerate(scalars)], partials(right, vectors), way
            )

        def step(k: Index, way: int) -> Any:
            return add(k, partials(lambda row, lane: builder.load(a, row * depth + k), rows), way)

        def several(k: Index) -> Any:
            values = partials(lambda row, lane: builder.load(a, row * depth + k + lane), rows)
            return tile.in_vectors(values, lambda s, scalars: add(k + s, scalars, s % ways))

        reduce = tile.reduce(depth, step, several=several)
        return builder.seq(tile.declare(), tile.clear(), reduce, tile.spill(out, 1))

    a, b, out = torch.randn(rows, depth), torch.randn(depth, width), torch.full((rows * width + 1,), 77.0)
    run_body(body, a.flatten(), b.flatten(), out)
    want = a @ b
    want[1] = 0
    torch.testing.assert_close(out[1:].view(rows, width), want)
    assert out[0] == 77


def test_a_first_product_is_stored() -> None:
    """Rows without a sum yet need not be cleared."""

    def body(builder: Builder, x: Any, out: Any) -> Any:
        tile = RegisterTile(builder, Printer(builder, {}), 2, 1, 4, "float32")
        scalars = partials(lambda row, lane: builder.load(x, row), 2)
        vector = [lambda lane: builder.load(x, lane)]
        steps = [tile.accumulate(scalars, vector, begun=begun) for begun in ([False, False], [True, False])]
        return builder.seq(tile.declare(), *steps, tile.spill(out))

    x, out = torch.tensor([2.0, 3.0, 5.0, 7.0]), torch.empty(8)
    run_body(body, x, out)
    assert out.view(2, 4).tolist() == [(4 * x).tolist(), (3 * x).tolist()]


def test_words_of_vectors() -> None:
    """Element s of each vector is in every lane of step s."""

    def body(builder: Builder, x: Any, out: Any) -> Any:
        tile = RegisterTile(builder, Printer(builder, {}), 1, 1, 4, "int32")
        vectors = [builder.load_vector(x, start, 4) for start in (0, 4)]
        return tile.words_in_vectors(vectors, lambda s, words: builder.store_vector(out, 4 * s, words[0] + words[1], 4))

    x, out = torch.arange(8, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    run_body(body, x, out)
    assert out.view(4, 4).tolist() == [[2 * s + 4] * 4 for s in range(4)]


def test_a_tile_without_scalars_has_nothing_to_add() -> None:
    """A window that reads padding only is no code."""
    builder = Builder()
    tile = RegisterTile(builder, Printer(builder, {}), 2, 1, 4, "float32")
    assert tile.accumulate([None, None], [lambda lane: builder.load(tile.buffer, lane)]) is None


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_the_first_lane_gets_the_sum_of_all(lanes: int) -> None:
    """`restore` is the inverse of `spill`; `sum_lanes` adds each accumulator's lanes."""

    def body(builder: Builder, x: Any, out: Any) -> Any:
        tile = RegisterTile(builder, Printer(builder, {}), 2, 3, lanes, "float32")
        return builder.seq(tile.declare(), tile.restore(x, 0), tile.sum_lanes(), tile.spill(out))

    x, out = torch.randn(6 * lanes), torch.empty(6 * lanes)
    run_body(body, x, out)
    torch.testing.assert_close(out.view(6, lanes)[:, 0], x.view(6, lanes).sum(1))
