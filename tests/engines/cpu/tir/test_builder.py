"""Statements of the builder, run: loops, places, choices, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Buffer, scalar_index
from torch_hybrid_backend.sizes.size import Symbol, function, symbol


def numbers(n: int) -> torch.Tensor:
    return torch.full((n,), -1, dtype=torch.int32)


@pytest.mark.parametrize("kind", ["serial", "parallel", "vectorized", "unrolled"])
def test_every_kind_of_loop(kind: str) -> None:
    """Each index once."""
    out = numbers(8)
    run_body(lambda b, a: b.loop(8, lambda i: b.store(a, i, b.index(i * 3)), kind), out)
    assert out.tolist() == [3 * i for i in range(8)]


def test_a_loop_of_one_iteration_is_its_body() -> None:
    """The index is 0, known when the kernel is emitted."""
    builder, seen = Builder(), []
    body = builder.loop(1, lambda i: seen.append(i) or tirx.Evaluate(0))  # type: ignore[func-returns-value]
    assert seen == [as_index(0)]
    assert isinstance(body, tirx.Evaluate)


def test_nested_loops() -> None:
    """Outermost first; without extents the body alone."""
    out = numbers(6)
    run_body(lambda b, a: b.nest((2, 3), lambda at: b.store(a, at[0] * 3 + at[1], b.index(at[0] * 10 + at[1]))), out)
    assert out.tolist() == [0, 1, 2, 10, 11, 12]
    builder = Builder()
    assert isinstance(builder.nest((), lambda at: tirx.Evaluate(len(at))), tirx.Evaluate)


@pytest.mark.parametrize("extents", [(2, 3, 4), (1, 5), (4, 1, 2), (7,), ()])
def test_fused_loops_give_coordinates(extents: tuple[int, ...]) -> None:
    """A loop runs over the row-major product; dimensions of one element are index 0."""
    total = torch.Size(extents).numel()
    out = numbers(total * (len(extents) + 1))

    def body(builder: Builder, a: Any) -> Any:
        def at(place: tuple[Index, ...]) -> Any:
            row = as_index(0)
            for index, extent in zip(place, extents, strict=True):
                row = row * extent + index
            width = len(extents) + 1
            stores = [builder.store(a, row * width + d, builder.index(index)) for d, index in enumerate(place)]
            return builder.seq(*stores, builder.store(a, row * width + len(place), builder.index(row)))

        return builder.fused(extents, at)

    run_body(body, out)
    rows = torch.cartesian_prod(*map(torch.arange, extents)).view(total, -1) if extents else torch.empty(1, 0)
    assert torch.equal(out.view(total, -1)[:, :-1].long(), rows.long())
    assert out.view(total, -1)[:, -1].tolist() == list(range(total))


@pytest.mark.parametrize("limit", [0, 3, 5])
def test_a_loop_whose_end_is_computed(limit: int) -> None:
    """A loop has as many iterations as the value says, which is at most the extent."""
    out, end = numbers(5), torch.tensor([limit], dtype=torch.int32)
    run_body(lambda b, n, a: b.loop_until(b.load(n, 0), 5, lambda i: b.store(a, i, 1)), end, out)
    assert out.tolist() == [1] * limit + [-1] * (5 - limit)


@pytest.mark.parametrize("extent", [1, 4])
def test_a_loop_that_stays_one(extent: int) -> None:
    """`rolled` runs as often as it says."""
    out = numbers(5)
    run_body(lambda b, a: b.rolled(extent, lambda i: b.store(a, i, b.load(a, i) + 1)), out)
    assert out.tolist() == [0] * extent + [-1] * (5 - extent)


def test_an_index_may_be_computed() -> None:
    """`bound` makes an index of a value; its range is what the schedule says."""
    out, place = numbers(8), torch.tensor([5], dtype=torch.int32)

    def body(builder: Builder, p: Any, a: Any) -> Any:
        index, bind = builder.bound(builder.load(p, 0), 7, "place")
        assert (index.low, index.high) == (0, 6)
        return builder.seq(bind, None, builder.store(a, index + 1, 9))

    run_body(body, place, out)
    assert out.tolist() == [-1] * 6 + [9, -1]


def test_branches() -> None:
    """Branches: `when` with and without the other side."""
    out = numbers(4)

    def body(b: Builder, a: Any) -> Any:
        return b.loop(
            4,
            lambda i: b.seq(
                b.when(b.index(i) < 2, b.store(a, i, 1), b.store(a, i, 2)), b.when(b.index(i) > 2, b.store(a, i, 3))
            ),
        )

    run_body(body, out)
    assert out.tolist() == [1, 1, 2, 3]


def test_quotients_and_remainders_round_down() -> None:
    """Quotients and remainders of negative indices are Python's."""
    out = numbers(22)

    def body(b: Builder, a: Any) -> Any:
        def at(i: Index) -> Any:
            low = i * -1 + 5
            return b.seq(b.store(a, i * 2, b.index(low // 3)), b.store(a, i * 2 + 1, b.index(low % 3)))

        return b.loop(11, at)

    run_body(body, out)
    assert out.tolist() == [value for i in range(5, -6, -1) for value in (i // 3, i % 3)]


def test_sizes_known_at_run_time() -> None:
    """Polynomials, quotients, remainders and extremes of sizes, as the arguments give them."""
    n, m = symbol("n"), symbol("m")
    sizes = [
        n, n * m + 3, n * n * 2 - m, n // 4, n % 4, function("max", n, m), function("min", n, m + 1), 0 * n + 7
    ]  # fmt: skip
    out = numbers(len(sizes))
    run_body(lambda b, a: b.seq(*[b.store(a, i, b.size(size)) for i, size in enumerate(sizes)]), out, n=13, m=5)
    assert out.tolist() == [13, 68, 333, 3, 1, 13, 6, 7]


def test_a_size_is_one_argument() -> None:
    """However often it is asked for."""
    builder = Builder()
    assert builder.argument_size(Symbol("n")).same_as(builder.argument_size(Symbol("n", 5)))
    assert not builder.argument_size(Symbol("n")).same_as(builder.argument_size(Symbol("m")))


def test_ranks_follow_the_estimates() -> None:
    """The shortest first, of equal ones the first; past the last one there is an error, and `ways` says how many there are."""
    estimates = {"slow": 3.0, "fast": 1.0, "equal": 1.0, "middle": 2.0}
    assert [Builder(rank).ranked_choice(estimates) for rank in range(4)] == ["fast", "equal", "middle", "slow"]
    builder = Builder(4)
    with pytest.raises(ScheduleError, match=r"rank 4 .* 4 ways"):
        builder.ranked_choice(estimates)
    assert (Builder().ways, builder.ways) == (1, 4)


def test_names_are_fresh() -> None:
    """No two objects of a kernel share one, whatever their stems."""
    builder = Builder()
    names = [builder.fresh(stem) for stem in ("i", "i", "i1", "i")]
    assert len(set(names)) == 4


@pytest.mark.parametrize("size", [16, 4_000_000])
def test_local_buffers_of_any_size(size: int) -> None:
    """On the stack where they are small, from the heap where that would overflow it."""
    out = numbers(size)

    def body(b: Builder, a: Any) -> Any:
        local = b.local(size, "int32")
        fill = b.loop(size, lambda i: b.store(local, i, b.index(i)))
        return b.seq(b.alloc(local), fill, b.loop(size, lambda i: b.store(a, i, b.load(local, (i * -1) + (size - 1)))))

    run_body(body, out)
    assert torch.equal(out, torch.arange(size - 1, -1, -1, dtype=torch.int32))


def test_a_local_buffer_of_a_size_known_at_run_time() -> None:
    """A local buffer is made as large as it has to be."""
    out = numbers(9)

    def body(b: Builder, a: Any) -> Any:
        n = symbol("n")
        local = b.local(n, "int32")
        fill = b.loop(n, lambda i: b.store(local, i, b.index(i * 3)))
        return b.seq(b.alloc(local), fill, b.loop(n, lambda i: b.store(a, i, b.load(local, i))))

    run_body(body, out, n=7)
    assert out.tolist() == [0, 3, 6, 9, 12, 15, 18, -1, -1]


def test_indices_that_are_equal() -> None:
    """Known ones are compared as the kernel is emitted."""
    out = numbers(4)
    one = tirx.const(1, "int32")
    run_body(lambda b, a: b.loop(4, lambda i: b.when(b.equal(i, 2), b.store(a, i, one))), out)
    assert out.tolist() == [-1, -1, 1, -1]
    assert isinstance(Builder().equal(as_index(3), 3), tirx.IntImm)


def test_variables_and_workspaces() -> None:
    """A value that is bound is computed once, before the statements behind it; a workspace is a local array on the heap."""
    out = numbers(3)

    def body(b: Builder, a: Any) -> Any:
        held, room = b.variable("held", "int32"), b.workspace(3, "int32", "room")
        assert room.scope() == "global"
        fill = b.loop(3, lambda i: b.store(room, i, held + b.index(i)))
        put = b.loop(3, lambda i: b.store(a, i, b.load(room, i)))
        return b.seq(b.alloc_on_heap(room), b.bind(held, b.load(a, 0) + 10), fill, put)

    run_body(body, out)
    assert out.tolist() == [9, 10, 11]


def test_asking_ahead_may_go_beyond_the_end() -> None:
    """A prefetch reads nothing: neither far behind the array nor before it does it do harm."""
    out = numbers(4)

    def body(b: Builder, a: Any) -> Any:
        far = [b.prefetch(a, b.size(offset), level=level) for offset in (1 << 28, -(1 << 28), 2) for level in (1, 2)]
        return b.seq(*far, b.store(a, 0, 5))

    run_body(body, out)
    assert out.tolist() == [5, -1, -1, -1]


def test_scalars_in_indices_need_a_printer() -> None:
    """A builder alone cannot print the expression inside."""
    place = scalar_index(Buffer((4,), "int64").at((as_index(0),)), 0, 3)
    with pytest.raises(TypeError, match="no printer"):
        Builder().index(place)


def test_functions_have_their_name_and_arguments() -> None:
    """1-D arrays aligned to their elements only, which never alias; of a length that is not asked where it is not known."""
    arrays = [argument(5, "float32", "x"), argument(symbol("n"), "float64", "y")]
    function_ = prim_func("some_kernel", arrays, tirx.Evaluate(0))
    assert str(function_.attrs["global_symbol"]) == "some_kernel"
    assert function_.attrs["tirx.noalias"]
    assert len(function_.params) == 2
    assert [array.data_alignment for array in arrays] == [4, 8]
    assert [int(array.shape[0]) for array in arrays] == [5, (1 << 31) - 1]
