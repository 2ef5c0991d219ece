"""Pointwise lowerings against eager."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from loops.check import EVERYTHING, FLOATS, INTEGERS, NUMBERS, check, sample, with_specials

aten = torch.ops.aten

UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid "
    "reciprocal logit"
).split()
SAME_DTYPE = "neg abs sign sgn floor ceil trunc round square relu".split()
FLOAT_ONLY = (
    "silu relu6 hardswish hardsigmoid mish gelu leaky_relu elu celu selu softplus hardtanh nan_to_num frac log_sigmoid"
).split()
COMPARISONS = "eq ne lt le gt ge".split()


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_functions(name: str, dtype: torch.dtype) -> None:
    """Functions of one number agree with eager on special values too; integers and booleans become floats."""
    x = sample(3, 7, dtype=dtype)
    check(getattr(aten, name).default, with_specials(x) if dtype.is_floating_point else x)


@pytest.mark.parametrize("name", SAME_DTYPE)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_functions_that_keep_the_dtype(name: str, dtype: torch.dtype) -> None:
    """Rounding, signs and squares keep integers integers."""
    x = sample(3, 7, dtype=dtype)
    check(getattr(aten, name).default, with_specials(x) if dtype.is_floating_point else x)


@pytest.mark.parametrize("name", FLOAT_ONLY)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations(name: str, dtype: torch.dtype) -> None:
    """Activations let NaN pass and keep infinities as eager does."""
    x = with_specials(sample(3, 7, dtype=dtype, low=-8, high=8))
    # ATen's own vectorised gelu gives NaN at infinity; the language gives the limit.
    check(getattr(aten, name).default, x.nan_to_num(7, 7, -7) if name == "gelu" else x)


ACTIVATIONS_WITH_ARGUMENTS = {
    "gelu tanh": lambda x: aten.gelu.default(x, approximate="tanh"),
    "leaky_relu": lambda x: aten.leaky_relu.default(x, 0.2),
    "elu": lambda x: aten.elu.default(x, 0.7, 1.3, 0.5),
    "celu": lambda x: aten.celu.default(x, 0.6),
    "softplus": lambda x: aten.softplus.default(x, 2.0, 3.0),
    "threshold": lambda x: aten.threshold.default(x, 0.5, -7.0),
    "logit": lambda x: aten.logit.default(x, 0.0625),
    "nan_to_num": lambda x: aten.nan_to_num.default(x, 1.0, 2.0, -3.0),
    "hardtanh": lambda x: aten.hardtanh.default(x, -0.5, 2.0),
    "log_sigmoid_forward": lambda x: aten.log_sigmoid_forward.default(x)[0],
    "clamp both": lambda x: aten.clamp.default(x, -1, 1.5),
    "clamp low": lambda x: aten.clamp.default(x, min=-1),
    "clamp high": lambda x: aten.clamp.default(x, max=1),
    "clamp_min": lambda x: aten.clamp_min.default(x, 0.25),
    "clamp_max": lambda x: aten.clamp_max.default(x, 0.25),
    "clamp nan": lambda x: aten.clamp.default(x, min=float("nan")),
    "pow 2": lambda x: aten.pow.Tensor_Scalar(x, 2),
    "pow 3": lambda x: aten.pow.Tensor_Scalar(x, 3.0),
    "pow -1": lambda x: aten.pow.Tensor_Scalar(x, -1),
    "pow 0.5": lambda x: aten.pow.Tensor_Scalar(x, 0.5),
    "pow -0.5": lambda x: aten.pow.Tensor_Scalar(x, -0.5),
    "pow 1.7": lambda x: aten.pow.Tensor_Scalar(x, 1.7),
    "pow of 2": lambda x: aten.pow.Scalar(2, x),
    "pow of 1.5": lambda x: aten.pow.Scalar(1.5, x),
}


@pytest.mark.parametrize("name", ACTIVATIONS_WITH_ARGUMENTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_arguments(name: str, dtype: torch.dtype) -> None:
    """Scalar arguments mean what they mean in eager."""
    x = sample(2, 9, dtype=dtype, low=-4, high=4)
    # Of roots of infinity and -0 eager's half types think otherwise than its float32.
    x = x if name.startswith("pow") and dtype.itemsize == 2 else with_specials(x)
    check(ACTIVATIONS_WITH_ARGUMENTS[name], x)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum", "eq", "lt", "logical_xor"])
def test_binary_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    """Arithmetic, extrema, comparisons and logic take every dtype, booleans included, and broadcast."""
    packet = getattr(aten, name)
    target = packet.Tensor if hasattr(packet, "Tensor") else packet.default
    check(target, sample(4, 1, 5, dtype=dtype), sample(3, 1, dtype=dtype, seed=1))


BINARY = {
    "sub alpha": lambda x, y: aten.sub.Tensor(x, y, alpha=2),
    "add alpha": lambda x, y: aten.add.Tensor(x, y, alpha=3),
    "rsub": lambda x, y: aten.rsub.Tensor(x, y, alpha=2),
    "div": aten.div.Tensor,
    "clamp": lambda x, y: aten.clamp.Tensor(x, y, y + 1),
    "add scalar": lambda x, y: aten.add.Tensor(x, 2),
    "add float": lambda x, y: aten.add.Tensor(x, 1.5),
    "rsub scalar": lambda x, y: aten.rsub.Scalar(x, 2),
    "mul scalar": lambda x, y: aten.mul.Scalar(x, 3),
    "div scalar": lambda x, y: aten.div.Scalar(x, 4),
    "eq scalar": lambda x, y: aten.eq.Scalar(x, 1),
    "gt float": lambda x, y: aten.gt.Scalar(x, 0.5),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
def test_binary(name: str, dtype: torch.dtype) -> None:
    """Factors, reversed operands and Python numbers follow PyTorch's promotion."""
    check(BINARY[name], sample(3, 4, dtype=dtype), sample(4, dtype=dtype, seed=1))


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_division_modes(mode: str | None, dtype: torch.dtype) -> None:
    """Quotients round as asked for every combination of signs; floats may divide by zero."""
    x, y = sample(8, 8, dtype=dtype, low=-9, high=9), sample(8, 8, dtype=dtype, low=-3, high=3, seed=2)
    x, y = x.float().round().to(dtype), y.float().round().to(dtype)
    if not dtype.is_floating_point:
        y = torch.where(y == 0, 2, y)
    check(lambda a, b: aten.div.Tensor_mode(a, b, rounding_mode=mode), x, y)
    check(lambda a: aten.div.Scalar_mode(a, -3, rounding_mode=mode), x)


@pytest.mark.parametrize("name", ["remainder", "fmod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_remainders(name: str, dtype: torch.dtype) -> None:
    """Remainders take the sign eager gives them."""
    x, y = sample(8, 8, dtype=dtype, low=-9, high=9), sample(8, 8, dtype=dtype, low=1, high=4, seed=2)
    target = getattr(aten, name)
    check(target.Tensor, x, y)
    check(target.Tensor, x, -y)
    check(lambda a: target.Scalar(a, -3), x)


def test_integer_division_cannot_trap() -> None:
    """The smallest integer by -1 wraps as in eager; a division by zero evaluates without stopping the process."""
    x = torch.tensor([torch.iinfo(torch.int64).min, 7, -7])
    check(lambda a, b: aten.div.Tensor_mode(a, b, rounding_mode="trunc"), x[1:], torch.tensor([-1, -1]))
    check(aten.remainder.Tensor, x, torch.tensor([-1, -1, -1]))


FLOAT_BINARY = "atan2 hypot copysign logaddexp logaddexp2 fmax fmin xlogy pow".split()


@pytest.mark.parametrize("name", FLOAT_BINARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float_binary(name: str, dtype: torch.dtype) -> None:
    """Special values meet special values as in eager."""
    packet = getattr(aten, name)
    overload = next(o for o in ("Tensor", "Tensor_Tensor", "default") if o in packet.overloads())
    special = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 1.0, -2.5], dtype=dtype)
    if name != "copysign":  # the sign of a NaN is nothing the language knows
        special = torch.cat([special, torch.tensor([float("nan")], dtype=dtype)])
    if name == "pow":
        special = special[2:]
    check(getattr(packet, overload), special[:, None], special)
    check(getattr(packet, overload), sample(5, 5, dtype=dtype), sample(5, dtype=dtype, seed=3))


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_bitwise(name: str, dtype: torch.dtype) -> None:
    """Bit operations on booleans are logical ones."""
    x, y = sample(4, 5, dtype=dtype, low=-100, high=100), sample(4, 5, dtype=dtype, low=-100, high=100, seed=1)
    check(getattr(aten, name).Tensor, x, y)
    check(aten.bitwise_not.default, x)
    check(lambda a: getattr(aten, name).Scalar(a, 1), x)


def _by_three(name: str) -> Callable[[torch.Tensor], object]:
    return lambda a: getattr(aten, name).Tensor_Scalar(a, 3)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts(dtype: torch.dtype) -> None:
    """Shifts by too many places give what eager gives."""
    x, places = sample(70, 1, dtype=dtype, low=-100, high=100), torch.arange(70).to(dtype)
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        check(getattr(aten, name).Tensor, x, places)
        check(_by_three(name), x)
    check(lambda a: operator.lshift(a, 2), x)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_logic(dtype: torch.dtype) -> None:
    """Logical operators ask whether operands differ from zero."""
    x, y = sample(4, 5, dtype=dtype), sample(4, 5, dtype=dtype, seed=1)
    for name in ("and", "or", "xor"):
        check(getattr(aten, f"logical_{name}").default, x, y)
    check(aten.logical_not.default, x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["isnan", "isinf", "isposinf", "isneginf"])
def test_predicates(name: str, dtype: torch.dtype) -> None:
    """Integers are neither NaN nor infinite."""
    x = sample(9, dtype=dtype)
    check(getattr(aten, name).default, with_specials(x) if dtype.is_floating_point else x)


def test_extrema_pass_nan() -> None:
    """max and min let NaN pass, fmax and fmin avoid it."""
    x, y = with_specials(sample(8)), with_specials(sample(8)).flip(0)
    for name in ("maximum", "minimum", "fmax", "fmin"):
        check(getattr(aten, name).default, x, y)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_promotes(name: str) -> None:
    """Operands are compared in torch.result_type: scalars and 0-d tensors do not widen tensors."""
    packet = getattr(aten, name)
    big = torch.tensor([2**24 + 1, 2**24, 5])
    check(packet.Tensor, big, torch.tensor([2.0**24, 2.0**24, 5.0]))
    check(packet.Tensor, torch.tensor([0.1, 0.2], dtype=torch.float32), torch.tensor(0.1, dtype=torch.float64))
    check(lambda a: packet.Scalar(a, 0.5), torch.tensor([0, 1], dtype=torch.int32))
    check(packet.Tensor, torch.tensor([1, 200], dtype=torch.uint8), torch.tensor([-1, 100], dtype=torch.int8))
    check(packet.Tensor, sample(4, dtype=torch.bool), torch.tensor([0.0, 1.0, 2.0, 1.0]))


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_choices(dtype: torch.dtype) -> None:
    """Choices by where and masked_fill are between tensors and numbers of every dtype, with broadcasting."""
    mask, x, y = sample(3, 1, dtype=torch.bool), sample(3, 4, dtype=dtype), sample(4, dtype=dtype, seed=1)
    check(aten.where.self, mask, x, y)
    check(lambda m, a: aten.where.ScalarOther(m, a, 1), mask, x)
    check(lambda m, a: aten.where.ScalarSelf(m, 1, a), mask, x)
    check(lambda m, a: aten.masked_fill.Scalar(a, m, 1), mask, x)
    check(lambda m, a, v: aten.masked_fill.Tensor(a, m, v), mask, x, torch.ones((), dtype=dtype))


def test_choices_promote() -> None:
    """The wider dtype of `where` is taken; the branch not taken may be NaN."""
    mask = torch.tensor([True, False, True])
    check(aten.where.self, mask, torch.tensor([1, 2, 3]), torch.tensor([0.5, float("nan"), float("nan")]))
    check(lambda m: aten.where.Scalar(m, 1.0, float("-inf")), mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ternary(dtype: torch.dtype) -> None:
    """addcmul, addcdiv and lerp with and without factors."""
    x, y, z = sample(3, 4, dtype=dtype), sample(4, dtype=dtype, seed=1), sample(3, 1, dtype=dtype, low=1, seed=2)
    check(lambda a, b, c: aten.addcmul.default(a, b, c, value=0.5), x, y, z)
    check(aten.addcdiv.default, x, y, z)
    check(aten.lerp.Tensor, x, y, z)
    check(lambda a, b: aten.lerp.Scalar(a, b, 0.75), x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward_formulas(dtype: torch.dtype) -> None:
    """Pointwise backward operators that decompositions may keep."""
    g, x = sample(3, 4, dtype=dtype), with_specials(sample(3, 4, dtype=dtype, seed=1))
    check(lambda a, b: aten.threshold_backward.default(a, b, 0.0), g, x)
    check(aten.sigmoid_backward.default, g, x)
    check(aten.tanh_backward.default, g, x)


def test_shared_reads_stay_small() -> None:
    """A chain of x = x * sigmoid(x) + x grows linearly, not exponentially."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = functional.silu(x) * 0.5 + x * 0.25
        return x

    check(chain, sample(3))
