"""Values that are used more than once: kept once, in expressions and before statements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.tir.builder import Builder
from torch_hybrid_backend.engines.cpu.tir.let_bindings import Bindings, Scope, StatementBindings
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, as_index


def squares(value: Any, bindings: Bindings, times: int) -> Any:
    """value^(2^times) times 2^-times, each step of which uses the last one twice."""
    for _ in range(times):
        value = bindings.let(value * value * 0.5, "float32")
    return value


def test_inside_an_expression() -> None:
    """A chain of values each used twice is computed, and printed, once a step; no statement is needed."""
    x, out = torch.tensor([1.25]), torch.zeros(1)

    def body(b: Builder, a: Any, o: Any) -> Any:
        bindings = Bindings(b)
        assert bindings.hoisted(lambda: b.load(a, 0), "float32") is None
        return b.store(o, 0, bindings.around(squares(b.load(a, 0), bindings, 5)))

    run_body(body, x, out)
    want = x.double()
    for _ in range(5):
        want = want * want * 0.5
    torch.testing.assert_close(out.double(), want)
    bindings = Bindings(Builder())
    assert len(str(bindings.around(squares(tirx.Var("x", "float32"), bindings, 30)))) < 5000


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_what_is_as_cheap_is_not_kept(dtype: str) -> None:
    """Variables and literals, and what was kept before."""
    builder = Builder()
    allocations: list[Any] = []
    for bindings in (Bindings(builder), StatementBindings(builder, as_index(0), 4, allocations)):
        for cheap in (tirx.Var("v", dtype), tirx.FloatImm("float32", 1.5), tirx.IntImm("int32", 3)):
            assert bindings.let(cheap, dtype) is cheap
        assert not allocations
        kept = bindings.let(tirx.Var("a", "float32") < tirx.Var("b", "float32"), "bool")
        made = len(allocations)
        assert bindings.let(kept, "bool").same_as(kept)
        assert len(allocations) == made


@pytest.mark.parametrize("width", [1, 8])
def test_before_a_statement(width: int) -> None:
    """Each lane keeps its own value, a bool too; what is the same for every lane is computed before the vector loop."""
    x, out, hoists = torch.randn(width), torch.zeros(width), []

    def body(b: Builder, a: Any, o: Any) -> Any:
        allocations: list[Any] = []

        def element(lane: Index) -> Any:
            bindings = StatementBindings(b, lane, width, allocations)
            first = bindings.hoisted(lambda: b.load(a, 0) * 2.0, "float32")
            hoists.append(first)
            value = squares(b.load(a, lane), bindings, 2)
            is_large = bindings.let(value > 0.1, "bool")
            add = tirx.FloatImm("float32", 0.0) if first is None else first
            return bindings.before(b.store(o, lane, tirx.Select(is_large, value, value * 3.0) + add))

        loop = b.loop(width, element, "vectorized")
        return b.seq(*allocations, loop)

    run_body(body, x, out)
    value = (x * x * 0.5) ** 2 * 0.5
    assert (hoists[0] is None) == (width == 1)
    torch.testing.assert_close(out, torch.where(value > 0.1, value, value * 3) + (x[0] * 2 if width > 1 else 0))


def test_hoisting_inside_what_is_hoisted() -> None:
    """The inner one needs no loop to be computed before: it is there already."""
    builder = Builder()
    bindings = StatementBindings(builder, as_index(0), 8, [])
    inner: list[Any] = []

    def compute() -> Any:
        inner.append(bindings.hoisted(lambda: tirx.Var("y", "float32") * 2.0, "float32"))
        return tirx.Var("x", "float32") * 3.0

    assert bindings.hoisted(compute, "float32") is not None
    assert inner == [None]


def test_a_branch_sees_what_was_bound_around_it() -> None:
    """And keeps its own to itself."""
    outer = Scope(Bindings(Builder()), None)
    inner = Scope(outer.bindings, outer)
    one, two = ops.const(1, "float32"), ops.const(2, "float32")
    outer.known[one], inner.known[two] = "outer", "inner"
    assert (inner.find(one), inner.find(two)) == ("outer", "inner")
    assert outer.find(two) is None
