"""The smart constructors of scalar expressions fold exactly what is certain."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
import torch

from torch_hybrid_backend.loops.index import var
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, FromIndex, Load, Map, is_rounded, nearest, unrounded
from torch_hybrid_backend.loops.ops import (
    add,
    call,
    cast,
    const,
    from_index,
    guard,
    index_in,
    logical_and,
    round_to,
    where,
)

ROW, COLUMN = var("i", 4), var("j", 8)
COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def test_literals_hold_what_their_dtype_holds() -> None:
    """float32 literals are rounded, integers wrap, overflow is infinite."""
    assert const(0.1, "float32").value == 0.10000000149011612
    assert const(0.1, "float64").value == 0.1
    assert const(1e39, "float32").value == math.inf
    assert const(-1e39, "float32").value == -math.inf
    assert const(300, "uint8").value == 44
    assert const(200, "int8").value == -56
    assert const(-1, "int64").value == -1
    assert const(3.7, "int32").value == 3
    assert math.isnan(const(math.nan, "float32").value)


def test_index_arithmetic_folds() -> None:
    """Sums, multiples, quotients and remainders of indices are indices."""
    for expr, index in (
        (call("add", from_index(ROW), from_index(COLUMN)), ROW + COLUMN),
        (call("sub", from_index(ROW), from_index(2)), ROW - 2),
        (call("mul", from_index(3), from_index(ROW)), ROW * 3),
        (call("floordiv", from_index(ROW * 8 + COLUMN), from_index(8)), ROW),
        (call("mod", from_index(ROW * 8 + COLUMN), from_index(8)), COLUMN),
    ):
        assert isinstance(expr, FromIndex)
        assert expr.index == index
    assert isinstance(call("mul", from_index(ROW), from_index(COLUMN)), Call)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_fold_only_where_ranges_decide(name: str) -> None:
    """A folded comparison is right for all values; of two single values every comparison is decided."""
    for low_a, low_b, size_a, size_b in itertools.product((-2, 0, 1, 3), (-1, 0, 2), (1, 2, 4), (1, 3)):
        a, b = var("a", size_a) + low_a, var("b", size_b) + low_b
        outcomes = {COMPARISONS[name](x + low_a, y + low_b) for x, y in itertools.product(range(size_a), range(size_b))}
        result = call(name, from_index(a), from_index(b))
        if isinstance(result, Const):
            assert outcomes == {result.value}
        else:
            assert len(outcomes) == 2


def test_extrema_fold_where_ranges_decide() -> None:
    """min and max of ranges that do not overlap."""
    small, large = from_index(ROW), from_index(COLUMN + 3)
    assert call("min", small, large) is small
    assert call("max", large, small) is large
    assert isinstance(call("max", small, from_index(COLUMN)), Call)


def test_conditions_fold() -> None:
    """Literal conditions choose at once; a range inside its bounds needs no condition."""
    yes, no = const(True, "bool"), const(False, "bool")
    a, b = const(1, "float32"), const(2, "float32")
    assert guard(yes, a, b) is a
    assert guard(no, a, b) is b
    assert call("where", no, a, b) is b
    assert call("not", yes).value is False
    assert index_in(ROW, 0, 4).value is True
    assert isinstance(index_in(ROW, 1, 4), Call)
    assert logical_and(yes, index_in(ROW, 1, 4)).op == "ge"
    assert logical_and(index_in(ROW, 1, 4), no).value is False


def test_casts_fold() -> None:
    """Casts to the own dtype, of literals, and of conditions through numbers disappear; others stay."""
    load = Load("bool", Buffer((4,), "bool"), (ROW,))
    assert cast(load, "bool") is load
    assert cast(cast(load, "float32"), "bool") is load
    assert cast(const(2.5, "float32"), "int64").value == 2
    assert cast(const(math.inf, "float32"), "float64").value == math.inf
    assert isinstance(cast(const(math.nan, "float32"), "int64"), Call)


def test_rounding_of_what_is_rounded_already_disappears() -> None:
    """An element of a bfloat16 tensor is a bfloat16, and so is what was rounded, zero, and a choice among such."""
    load, wide = (Load("float32", Buffer((4,), dtype), (ROW,)) for dtype in ("bfloat16", "float32"))
    assert round_to(load, "bfloat16") is load
    assert round_to(load, "float16").op == "round"
    rounded, is_first = round_to(wide, "bfloat16"), call("lt", from_index(ROW), from_index(1))
    assert round_to(rounded, "bfloat16") is rounded
    assert round_to(rounded, "float16") is not rounded
    chosen = guard(is_first, where(is_first, load, rounded), const(0, "float32"))
    assert round_to(chosen, "bfloat16") is chosen
    for other in (wide, where(is_first, load, wide), guard(is_first, wide, load)):
        assert round_to(other, "bfloat16").op == "round"


def test_unknown_operations_are_errors() -> None:
    """The message lists what is legal."""
    with pytest.raises(ValueError, match="legal"):
        call("frobnicate", const(1, "float32"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_literals_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """To the nearest, ties to even, too large ones to infinity; what changes nothing needs no operation."""
    bits = torch.randint(-(2**31), 2**31, (2000,), generator=torch.Generator().manual_seed(0)).int().view(torch.float32)
    numbers = torch.cat(
        [bits[bits.isfinite()], torch.tensor([0.1, 65519.0, 65520.0, 3.39e38, 1.00390625, -1.01171875, 1e-45])]
    )
    name = str(dtype).removeprefix("torch.")
    for number, want in zip(numbers.tolist(), numbers.to(dtype).float().tolist(), strict=True):
        literal = round_to(const(number, "float32"), name)
        assert isinstance(literal, Const)
        assert literal.value == want
        assert nearest(number, name) == want
        assert nearest(number, "float32") == number


def test_what_chooses_among_rounded_numbers_is_rounded() -> None:
    """Extremes, signs, whole parts, conditions and bytes of half types are such numbers; sums are not."""
    load = Load("float32", Buffer((4,), "float16"), (ROW,))
    byte = Load("int8", Buffer((4,), "int8"), (ROW,))
    for op in ("neg", "abs", "sign", "floor", "ceil", "trunc", "round_even"):
        assert is_rounded(call(op, load), "float16")
        assert not is_rounded(call(op, load), "bfloat16")
    assert is_rounded(call("max", load, call("neg", load)), "float16")
    assert is_rounded(cast(byte, "float32"), "float16")
    assert is_rounded(cast(call("lt", load, load), "float32"), "bfloat16")
    assert not is_rounded(add(load, load), "float16")


def test_a_value_of_a_half_type_is_rounded() -> None:
    """A map's scalars are numbers of its dtype, and a store is given what it has left to round."""
    x = Buffer((4,), "bfloat16")
    doubled = Map((4,), "bfloat16", lambda index: add(x.at(index), x.at(index)))
    value = doubled.at((ROW,))
    assert is_rounded(value, "bfloat16")
    left = unrounded(value, "bfloat16")
    assert isinstance(left, Call)
    assert left.op == "add"
    assert unrounded(value, "float16") is value
    assert Map((4,), "float32", doubled.fn).at((ROW,)).dtype == "float32"
