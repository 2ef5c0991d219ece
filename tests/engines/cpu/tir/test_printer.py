"""The printer: sharing, decided conditions, local buffers, scalars inside indices."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Const, Expr, scalar_index
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import contiguous

N = 64
I = LoopVar("i", N)  # noqa: E741


class One:
    """x -> out over one dimension of 64."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.x, self.out = Buffer((N,), "float32", "x"), Buffer((N,), "float32", "out")
        self.arrays = [argument(N, "float32", "x"), argument(N, "float32", "out")]
        pairs = zip(self.arrays, (self.x, self.out), strict=True)
        self.printer = Printer(self.builder, {b: (a, contiguous((N,))) for a, b in pairs})
        self.at = self.x.at((index_of(I),))

    def store(self, value: Expr) -> Store:
        return Store(self.out, (index_of(I),), value)

    def script(self, value: Expr) -> str:
        body = self.printer.vector_loop(N, lambda lane: self.printer.store(self.store(value), {I: lane}))
        return str(prim_func("k", self.arrays, body).script())


def test_equal_subexpressions_are_printed_once() -> None:
    """Two expressions built apart that compute the same share one value, and one load."""
    one = One()
    twice = ops.add(ops.call("exp", one.x.at((index_of(I),))), ops.call("exp", one.x.at((index_of(I),))))
    script = one.script(twice)
    assert script.count("llvm.rint") == 1
    assert script.count(" x[") == 1


def test_code_grows_with_the_graph_and_not_with_its_tree() -> None:
    """A value squared and added forty times over is forty steps, compiled at once; as a tree it would be 2^40."""
    one = One()
    value: Expr = one.at
    for _ in range(40):
        value = ops.mul(ops.add(value, ops.const(1, "float32")), ops.sub(value, ops.const(1, "float32")))
        value = ops.mul(value, ops.const(0.5, "float32"))
    assert len(one.script(value)) < 60_000


def test_what_is_the_same_for_every_lane_is_computed_before_the_vector_loop() -> None:
    """A weight of the row alone, exp(row), is computed once and read by all lanes; each row has its own."""
    one, row = One(), LoopVar("row", 4)
    weight = ops.call("exp", ops.cast(ops.from_index(index_of(row)), "float32"))
    store = Store(
        one.out, (index_of(row) * 16 + index_of(I),), ops.mul(one.x.at((index_of(row) * 16 + index_of(I),)), weight)
    )
    body = one.builder.loop(
        4, lambda r: one.printer.vector_loop(16, lambda lane: one.printer.store(store, {row: r, I: lane}))
    )
    function = prim_func("k", one.arrays, body)
    before, _, vectors = str(function.script()).partition("vectorized")
    assert "llvm.rint" in before
    assert "llvm.rint" not in vectors
    built = build("k", function, tvm_target(Target.host()))
    x, out = torch.randn(N), torch.empty(N)
    built["k"](x, out)
    torch.testing.assert_close(out, (x.view(4, 16) * torch.arange(4.0).exp()[:, None]).flatten())


def test_chains_of_transcendental_functions_compile() -> None:
    """mish(mish(x)) is right: three polynomials inside three more, in one kernel."""
    one = One()

    def mish(x: Expr) -> Expr:
        return ops.mul(x, ops.call("tanh", ops.call("log1p", ops.call("exp", x))))

    body = one.printer.vector_loop(N, lambda lane: one.printer.store(one.store(mish(mish(one.at))), {I: lane}))
    built = build("k", prim_func("k", one.arrays, body), tvm_target(Target.host()))
    x, out = torch.randn(N), torch.empty(N)
    built["k"](x, out)
    functional = torch.nn.functional
    torch.testing.assert_close(out, functional.mish(functional.mish(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limits", [(-128.0, 127.0), (0.0, 255.0)])
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_rounding_before_a_cast_is_one_instruction(limits: tuple[float, float], capability: str) -> None:
    """Halves go to even, what is beyond the limits to them, by the instruction that converts: in vectors, with no call."""
    one = One()
    low, high = (Const("float32", limit) for limit in limits)
    rounded = ops.call("min", ops.call("max", ops.call("round_even", one.at), low), high)
    value = ops.cast(ops.cast(rounded, "int32"), "float32")
    body = one.printer.vector_loop(N, lambda lane: one.printer.store(one.store(value), {I: lane}))
    built = build("k", prim_func("k", one.arrays, body), tvm_target(Target.host().within(capability)))
    assert "rint" not in built.inspect_source("asm")
    x = torch.randn(N) * 100
    ends = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        126.5,
        127.5,
        254.5,
        255.5,
        -128.5,
        1e10,
        -1e10,
        3e38,
        torch.inf,
        -torch.inf,
    ]
    x[: len(ends)] = torch.tensor(ends)
    out = torch.empty(N)
    built["k"](x, out)
    assert torch.equal(out, x.round().clamp(*limits))


@pytest.mark.parametrize(
    ("start", "extent", "expected"), [(0, 8, True), (8, 8, True), (24, 8, False), (16, 8, None), (40, 1, False)]
)
def test_conditions_on_indices_are_decided_by_their_ranges(start: int, extent: int, expected: bool | None) -> None:
    """`i < 20` is decided where the schedule's index lies on one side of 20 altogether."""
    one = One()
    inner = index_of(LoopVar("j", extent))
    condition = ops.index_in(index_of(I), 0, 20)
    assert one.printer.decide(condition, {I: inner + start}) is expected
    negated = ops.call("not", condition)
    assert one.printer.decide(negated, {I: inner + start}) is (None if expected is None else not expected)
    both = ops.call("and", condition, Const("bool", False))
    assert one.printer.decide(both, {I: inner + start}) is False


def test_a_decided_guard_leaves_only_its_branch() -> None:
    """The branch that is never taken is not printed: its loads would lie outside the buffer."""
    one = One()
    place = index_of(I) - 100
    value = ops.guard(ops.index_in(place, 0, N), one.x.at((place,)), one.at)
    script = one.script(value)
    assert "-100" not in script
    assert "if" not in script.split("T.func_attr")[1].replace("T.if_then_else", "if ")


def test_joined_tensors_are_read_without_masks() -> None:
    """A vector of a concatenation lies in one of its tensors: which one is a branch around the vector, asked once for each of them."""
    one = One()
    place = index_of(I)
    read = [one.x.at((place - start,)) for start in (0, 16, 48)]
    last = ops.call("lt", ops.from_index(place), ops.from_index(as_index(48)))
    first = ops.call("lt", ops.from_index(place), ops.from_index(as_index(16)))
    zero = ops.const(0, "float32")
    behind = ops.guard(ops.call("not", last), ops.guard(ops.index_in(place - 48, 0, 16), read[2], zero), zero)
    middle = ops.guard(ops.call("not", first), ops.guard(last, read[1], behind), zero)
    joined = one.store(ops.guard(first, read[0], middle))

    def vector(number: Index) -> Stmt:
        return one.printer.vector_loop(16, lambda lane: one.printer.store(joined, {I: number * 16 + lane}))

    script = str(prim_func("k", one.arrays, one.builder.loop(N // 16, vector)).script())
    assert "Select" not in script
    assert script.count("if ") == 3


def test_locals_override_loads() -> None:
    """A load of a kernel-local buffer prints as its override says, given indices of the schedule."""
    one = One()
    local = Buffer((N,), "float32", "accumulator")
    seen = []

    def load(index: tuple[object, ...]) -> object:
        seen.append(index)
        return one.builder.load(one.arrays[0], 3)

    one.printer.locals[local] = load  # type: ignore[assignment]
    printed = one.printer.expr(local.at((index_of(I),)), {I: as_index(5)})
    assert seen == [(as_index(5),)]
    assert "x[3]" in str(printed)


def test_an_expression_stands_alone() -> None:
    """`expr` needs no statement before it: what it shares, it binds itself."""
    one = One()
    e = ops.call("exp", one.at)
    printed = one.printer.expr(ops.mul(e, e), {I: as_index(0)})
    built = build(
        "k", prim_func("k", one.arrays, one.builder.store(one.arrays[1], 0, printed)), tvm_target(Target.host())
    )
    x, out = torch.randn(N), torch.zeros(N)
    built["k"](x, out)
    torch.testing.assert_close(out[0], x[0].exp() ** 2)


def test_scalars_in_indices_follow_the_environment() -> None:
    """A scalar inside an index is printed with the loop variables of the expression that uses it."""
    one = One()
    position = scalar_index(ops.cast(one.at, "int64"), 0, N - 1)
    printed = str(one.printer.expr(one.x.at((position,)), {I: as_index(7)}))
    assert "x[7]" in printed.replace("x[T.Cast", "x[ T.Cast")
