"""Transcendental functions of float32 as TIR arithmetic that vectorises.

TVM turns `tirx.exp` and friends into one libm call a lane, 5 to 20 times slower than these polynomials. Every function takes `let`, which
binds a value to a variable (so that using it twice does not print it twice), and operands that are bound already.

Worst relative errors against float64 on the tested ranges (tests/engines/cpu/tir/test_math.py asserts them):

    exp, exp2, expm1         2e-7      results below 2^-126 are rounded to denormals; exp2 overflows from 128
    exp_nonpositive          4e-7      arguments <= 0 only: 2e-7 from -20 on, 0 below -87.7
    log, log2, log10, log1p  3e-7      near 1 too; denormal arguments are exact
    tanh, erf                5e-7      sigmoid 3e-7 (0 below -88.3, where eager has denormals)
    erfc                     2e-6      down to the smallest normal number
    pow                      3e-7      computed through float64
    sin, cos                 2e-7      of every float32
    tan                      6e-7      as sin / cos

asinh, acosh and atanh follow from log1p (6e-7, in `arithmetic`). The others (asin, acos, atan, atan2, sinh, cosh) and most of float64 are libm
calls.
Infinities and NaN follow C99 unless said otherwise.

Sources: exp, log, sin, cos: Cephes (Moshier 1992) `expf`, `logf`, `sinf`, `cosf`; erf: rational function of Eigen (`generic_fast_erf_float`
before 2024), as in TVM's topi; erfc: Chebyshev fit of Numerical Recipes 6.2; log1p: Kahan's correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import TirExpr

# Binds a value of the given dtype to a variable.
Let = Callable[[TirExpr, str], TirExpr]

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # n * high is exact for |n| < 2^15
# 1 / (2 pi) in words of 32 bits, behind one of zeros.
_TURNS = (0, 0x28BE60DB, 0x9391054A, 0x7F09D5F4, 0x7D4D3770, 0x36D8A566, 0x4F10E410, 0x7F9458EA)


def f32(value: float) -> TirExpr:
    return tirx.FloatImm("float32", value)


def _f64(value: float) -> TirExpr:
    return tirx.FloatImm("float64", value)


def _i32(value: int) -> TirExpr:
    return tirx.IntImm("int32", value)


def opaque(x: TirExpr, dtype: str) -> TirExpr:
    """x, hidden from TVM's simplifier, which cancels `x + y - y` and `x - x` for floats too. Costs no instruction."""
    bits = "int64" if dtype == "float64" else "int32"
    return tirx.reinterpret(dtype, tirx.reinterpret(bits, x))


def fenced(x: TirExpr, dtype: str) -> TirExpr:
    """x, a product that LLVM may not contract with a sum to a multiply-add. Costs no instruction."""
    return tirx.call_llvm_pure_intrin(dtype, "llvm.arithmetic.fence", x)


def round_even(x: TirExpr, dtype: str) -> TirExpr:
    """x rounded to an integer, halves to even. Not `tirx.nearbyint`: TVM does not vectorise it."""
    return tirx.call_llvm_pure_intrin(dtype, "llvm.rint", x)


def round_even_to_int32(x: TirExpr) -> TirExpr:
    """A float32 as the nearest int32, halves to even; the smallest int32, or another one, for what is none."""
    return tirx.call_llvm_pure_intrin("int32", "llvm.lrint", x)


def is_nan(x: TirExpr, dtype: str) -> TirExpr:
    """True if x is NaN. Not `tirx.isnan`, which TVM does not vectorise, nor `x != x`: TVM's `!=` is false for NaN."""
    return tirx.Not(tirx.EQ(x, opaque(x, dtype)))


def is_finite(x: TirExpr, dtype: str) -> TirExpr:
    """True if x is neither infinite nor NaN."""
    return tirx.LT(tirx.abs(x), tirx.FloatImm(dtype, math.inf))


def _horner(x: TirExpr, coefficients: Sequence[float], of: Callable[[float], TirExpr] = f32) -> TirExpr:
    """The polynomial with `coefficients`, highest power first."""
    result = of(coefficients[0])
    for c in coefficients[1:]:
        result = result * x + of(c)
    return result


def _at_least(x: TirExpr, low: float) -> TirExpr:
    """max(x, low), NaN where x is: one instruction (`maxps` returns its second operand when one is NaN)."""
    return tirx.Select(tirx.GT(f32(low), x), f32(low), x)


def _at_most(x: TirExpr, high: float) -> TirExpr:
    return tirx.Select(tirx.LT(f32(high), x), f32(high), x)


def _power_of_2(n: TirExpr) -> TirExpr:
    """2^n of an int32 in -126 .. 127."""
    return tirx.reinterpret("float32", (n + _i32(127)) << _i32(23))


def _expm1_reduced(let: Let, r: TirExpr) -> TirExpr:
    """e^r - 1 for |r| <= ln(2) / 2."""
    poly = _horner(
        r,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
    return let(poly * let(r * r, "float32") + r, "float32")


def _reduce_exp(let: Let, x: TirExpr) -> tuple[TirExpr, TirExpr]:
    """(n, r) with x = n ln(2) + r, |r| <= ln(2) / 2."""
    n = let(round_even(x * f32(math.log2(math.e)), "float32"), "float32")
    return n, let(x - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), "float32")


def _scale(let: Let, y: TirExpr, n: TirExpr) -> TirExpr:
    """y * 2^n in two steps, so that n from -252 to 254 overflows and underflows gradually."""
    whole = let(tirx.Cast("int32", n), "int32")
    half = let(whole >> _i32(1), "int32")
    return y * _power_of_2(half) * _power_of_2(whole - half)


def exp(let: Let, x: TirExpr) -> TirExpr:
    x = let(_at_most(let(_at_least(x, -104.5), "float32"), 89.0), "float32")
    n, r = _reduce_exp(let, x)
    return _scale(let, let(_expm1_reduced(let, r) + f32(1), "float32"), n)


def exp_nonpositive(let: Let, x: TirExpr) -> TirExpr:
    """e^x for x <= 0, as softmax asks: 12 instructions, half of `exp`'s. Below -87.7 the factor 2^n is 0, as if n were -127.

    n and 2^n as in `sigmoid`. ln(2) is one number: what it leaves out, 1.9e-9 n, is an error of 2.3e-7 at -87 and less above.
    """
    x = let(_at_least(x, -88.0), "float32")
    rounding = f32(3 * 2.0**22 + 127)
    t = let(opaque(x * f32(math.log2(math.e)) + rounding, "float32"), "float32")
    r = let(x - let(t - rounding, "float32") * f32(math.log(2)), "float32")
    power = tirx.reinterpret("float32", tirx.reinterpret("int32", t) << _i32(23))
    return power * let(_horner(r, _EXP_SHORT), "float32")


def exp2(let: Let, x: TirExpr) -> TirExpr:
    x = let(_at_most(let(_at_least(x, -151.0), "float32"), 129.0), "float32")
    n = let(round_even(x, "float32"), "float32")
    r = let((x - opaque(n, "float32")) * f32(math.log(2)), "float32")
    return _scale(let, let(_expm1_reduced(let, r) + f32(1), "float32"), n)


def expm1(let: Let, x: TirExpr) -> TirExpr:
    x = let(_at_most(let(_at_least(x, -30.0), "float32"), 89.0), "float32")
    n, r = _reduce_exp(let, x)
    # 2^n (e^r - 1) + 2^n - 1, halved so that 2^128 is never formed; exact for n = 0.
    half = let(_power_of_2(tirx.Cast("int32", n) - _i32(1)), "float32")
    return f32(2) * (half * _expm1_reduced(let, r) + (half - f32(0.5)))


def _log_parts(let: Let, x: TirExpr) -> tuple[TirExpr, TirExpr, TirExpr]:
    """(e, m - 1, log(m) - (m - 1)) with x = 2^e m, sqrt(1/2) <= m < sqrt(2), for x > 0 and finite."""
    tiny = let(tirx.LT(x, f32(2.0**-126)), "bool")
    bits = let(tirx.reinterpret("int32", tirx.Select(tiny, x * f32(2.0**23), x)), "int32")
    # Adding the distance from sqrt(1/2) to 1 moves the exponent's step to sqrt(1/2).
    shifted = let(bits + _i32(0x3F800000 - 0x3F3504F3), "int32")
    e = tirx.Cast("float32", (shifted >> _i32(23)) - tirx.Select(tiny, _i32(127 + 23), _i32(127)))
    m = tirx.reinterpret("float32", (shifted & _i32(0x007FFFFF)) + _i32(0x3F3504F3))
    f = let(m - f32(1), "float32")
    poly = _horner(
        f,
        (
            *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
            *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
        ),
    )
    f2 = let(f * f, "float32")
    return let(e, "float32"), f, let(poly * f * f2 - f32(0.5) * f2, "float32")


def _log_ends(x: TirExpr, result: TirExpr) -> TirExpr:
    """`result` where 0 < x < inf, else what every logarithm is there."""
    inf, nan = f32(math.inf), f32(math.nan)
    # x itself where it is infinity or NaN.
    ordinary = tirx.Select(tirx.LT(x, inf), result, x)
    return tirx.Select(tirx.GT(x, f32(0)), ordinary, tirx.Select(tirx.EQ(x, f32(0)), f32(-math.inf), x * nan))


def log(let: Let, x: TirExpr) -> TirExpr:
    e, f, tail = _log_parts(let, x)
    return _log_ends(x, let(e * f32(_LN2_HIGH) + (f + (e * f32(_LN2_LOW) + tail)), "float32"))


def _log_in_base(let: Let, x: TirExpr, base: float) -> TirExpr:
    """log(m) / log(base) + e log(2) / log(base); 1 / log(base) as 1 + fraction or fraction, so that the sum stays exact."""
    e, f, tail = _log_parts(let, x)
    scale = 1 / math.log(base)
    return _log_ends(x, let(e * f32(math.log(2) * scale) + (f + tail) * f32(scale), "float32"))


def log2(let: Let, x: TirExpr) -> TirExpr:
    return _log_in_base(let, x, 2.0)


def log10(let: Let, x: TirExpr) -> TirExpr:
    return _log_in_base(let, x, 10.0)


def log1p(let: Let, x: TirExpr) -> TirExpr:
    u = let(opaque(x + f32(1), "float32"), "float32")
    d = let(u - f32(1), "float32")
    corrected = log(let, u) * let(x / d, "float32")
    small = tirx.Select(tirx.EQ(d, f32(0)), x, corrected)
    return tirx.Select(tirx.EQ(x, f32(math.inf)), x, small)


def tanh(let: Let, x: TirExpr) -> TirExpr:
    # From |x| = 9.02 on, the nearest float32 is 1.
    magnitude = let(_at_most(tirx.abs(x), 9.1), "float32")
    e = let(expm1(let, let(magnitude * f32(2), "float32")), "float32")
    y = let(e / (e + f32(2)), "float32")
    sign = tirx.reinterpret("int32", x) & _i32(-(2**31))
    return tirx.reinterpret("float32", tirx.reinterpret("int32", y) | sign)


def sigmoid(let: Let, x: TirExpr) -> TirExpr:
    """1 / (1 + e^-x), half the instructions of `exp` for e^-x: 2^n needs no second factor, for a sum with 1 hides what underflows.

    Adding 3 * 2^22 + 127 rounds n = -x / ln(2) to an integer and leaves n + 127, the exponent of 2^n, in the low bits of the sum.
    """
    x = let(_at_most(let(_at_least(x, -88.8), "float32"), 88.0), "float32")
    rounding = f32(3 * 2.0**22 + 127)
    t = let(opaque(x * f32(-math.log2(math.e)) + rounding, "float32"), "float32")
    n = let(t - rounding, "float32")
    r = let(f32(0) - x - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), "float32")
    power = tirx.reinterpret("float32", tirx.reinterpret("int32", t) << _i32(23))
    return f32(1) / (power * let(_horner(r, _EXP_REDUCED), "float32") + f32(1))


# e^r for |r| <= ln(2) / 2, least maximal relative error: 1.7e-8, and 9.3e-8 with a term less.
_EXP_REDUCED = (1.384364441e-03, 8.374163881e-03, 4.166800156e-02, 1.666643173e-01, 4.999999404e-01, 1.0, 1.0)
_EXP_SHORT = (8.290272206e-03, 4.189816117e-02, 1.666763872e-01, 4.999914765e-01, 9.999997020e-01, 1.0)


_ERF_NUMERATOR = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_DENOMINATOR = (
    *(-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03),
    *(-7.37332916720468e-03, -1.42647390514189e-02),
)


def erf(let: Let, x: TirExpr) -> TirExpr:
    x = let(_at_most(let(_at_least(x, -4.0), "float32"), 4.0), "float32")
    x2 = let(x * x, "float32")
    y = let(x * (_horner(x2, _ERF_NUMERATOR) / _horner(x2, _ERF_DENOMINATOR)), "float32")
    return _at_most(let(_at_least(y, -1.0), "float32"), 1.0)


_ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


def erfc(let: Let, x: TirExpr) -> TirExpr:
    z = let(_at_most(tirx.abs(x), 11.0), "float32")
    t = let(f32(1) / (f32(1) + f32(0.5) * z), "float32")
    # z^2 = high^2 + (z - high)(z + high), with high^2 exact: an error in the exponent would be one of the result.
    high = let(tirx.reinterpret("float32", tirx.reinterpret("int32", z) & _i32(-4096)), "float32")
    rest = let(_horner(t, _ERFC) - (z - opaque(high, "float32")) * (z + high), "float32")
    y = let(t * exp(let, let(f32(0) - high * high, "float32")) * exp(let, rest), "float32")
    return tirx.Select(tirx.LT(x, f32(0)), f32(2) - y, y)


def _quarter_turns(let: Let, x: TirExpr) -> tuple[TirExpr, TirExpr]:
    """(q, r) with |x| = (4k + q) pi/2 + r: q an int32 in 0 .. 3, r a float32 with |r| <= pi/4.

    Payne and Hanek, "Radian reduction for trigonometric functions", 1983: |x| = m 2^e with a whole m. Bits of 2^e / (2 pi) that are whole turns
    drop out, so 96 bits of 1 / (2 pi) from bit e on, times m, are the turns that are left: 64 bits of them, for every float32.
    """
    bits = let(tirx.reinterpret("int32", x), "int32")
    exponent = (bits >> _i32(23)) & _i32(0xFF)
    # Where the first of the 96 bits stands in `_TURNS`.
    start = let(tirx.Select(tirx.GT(exponent, _i32(118)), exponent - _i32(118), _i32(0)), "int32")
    word, shift = let(start >> _i32(5), "int32"), let(start & _i32(31), "int32")

    def picked(number: int) -> TirExpr:
        result = _word(_TURNS[number])
        for place in range(1, 5):
            if number + place < len(_TURNS):
                result = tirx.Select(tirx.EQ(word, _i32(place)), _word(_TURNS[number + place]), result)
        return let(result, "uint32")

    words = [picked(number) for number in range(4)]
    left, one = let(tirx.Cast("uint32", shift), "uint32"), tirx.IntImm("uint32", 1)
    right = let(tirx.IntImm("uint32", 31) - left, "uint32")

    def window(number: int) -> TirExpr:
        """32 bits from bit `start` + 32 `number` on."""
        both = (words[number] << left) | ((words[number + 1] >> one) >> right)
        return tirx.Cast("uint64", let(both, "uint32"))

    def wide(value: int) -> TirExpr:
        return tirx.IntImm("uint64", value)

    whole = let(tirx.Cast("uint64", tirx.Cast("uint32", (bits & _i32(0x7FFFFF)) | _i32(0x800000))), "uint64")
    turns = ((whole * window(0)) << wide(32)) + whole * window(1) + ((whole * window(2)) >> wide(32))
    # An eighth of a turn further, what is left of a quarter is that much too large.
    moved = let(turns + wide(1 << 61), "uint64")
    part = let(tirx.Cast("int64", moved & wide((1 << 62) - 1)) - tirx.IntImm("int64", 1 << 61), "int64")
    high = tirx.Cast("float64", tirx.Cast("int32", part >> tirx.IntImm("int64", 32)))
    low = tirx.Cast("float64", tirx.Cast("int32", (part & tirx.IntImm("int64", 0xFFFFFFFF)) >> tirx.IntImm("int64", 1)))
    rest = let((high * _f64(2.0**32) + low * _f64(2.0)) * _f64(2 * math.pi / 2.0**64), "float64")
    near = let(tirx.LT(tirx.abs(x), f32(0.7853981)), "bool")
    quarter = tirx.Select(near, _i32(0), tirx.Cast("int32", moved >> wide(62)))
    return let(quarter, "int32"), let(tirx.Select(near, tirx.abs(x), tirx.Cast("float32", rest)), "float32")


def _word(value: int) -> TirExpr:
    return tirx.IntImm("uint32", value)


def _quarter(let: Let, q: TirExpr, r: TirExpr) -> TirExpr:
    """sin(q pi/2 + r) for |r| <= pi/4."""
    r2 = let(r * r, "float32")
    sine = _horner(r2, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)) * r2 * r + r
    cosine = _horner(r2, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)) * r2 * r2 - (
        f32(0.5) * r2 - f32(1)
    )
    y = let(tirx.Select(tirx.EQ(q & _i32(1), _i32(0)), sine, cosine), "float32")
    return tirx.Select(tirx.EQ(q & _i32(2), _i32(0)), y, f32(0) - y)


def _of_finite(x: TirExpr, y: TirExpr) -> TirExpr:
    """y where x is finite, else NaN."""
    return tirx.Select(tirx.LT(tirx.abs(x), f32(math.inf)), y, x * f32(math.nan))


def _with_sign_of(let: Let, x: TirExpr, y: TirExpr) -> TirExpr:
    """y, negated where x has a sign."""
    sign = tirx.reinterpret("int32", x) & _i32(-(2**31))
    return tirx.reinterpret("float32", tirx.bitwise_xor(tirx.reinterpret("int32", let(y, "float32")), sign))


def sin(let: Let, x: TirExpr) -> TirExpr:
    return _of_finite(x, let(_with_sign_of(let, x, _quarter(let, *_quarter_turns(let, x))), "float32"))


def cos(let: Let, x: TirExpr) -> TirExpr:
    q, r = _quarter_turns(let, x)
    return _of_finite(x, let(_quarter(let, let(q + _i32(1), "int32"), r), "float32"))


def tan(let: Let, x: TirExpr) -> TirExpr:
    q, r = _quarter_turns(let, x)
    sine, cosine = let(_quarter(let, q, r), "float32"), let(_quarter(let, let(q + _i32(1), "int32"), r), "float32")
    return _of_finite(x, let(_with_sign_of(let, x, sine / cosine), "float32"))


def _log2_wide(let: Let, x: TirExpr) -> TirExpr:
    """log2 of a positive finite float32, as float64 with an absolute error below 1e-11."""
    wide = let(tirx.Cast("float64", x), "float64")  # a denormal float32 is a normal float64
    bits = let(tirx.reinterpret("int64", wide), "int64")
    offset = 0x3FE6A09E667F3BCD  # sqrt(1/2)
    shifted = let(bits + tirx.IntImm("int64", 0x3FF0000000000000 - offset), "int64")
    e = tirx.Cast("float64", tirx.Cast("int32", shifted >> tirx.IntImm("int64", 52)) - _i32(1023))
    mantissa = (shifted & tirx.IntImm("int64", (1 << 52) - 1)) + tirx.IntImm("int64", offset)
    m = let(tirx.reinterpret("float64", mantissa), "float64")
    # log(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716: the series to s^13 leaves 2e-13.
    s = let((m - _f64(1)) / (m + _f64(1)), "float64")
    s2 = let(s * s, "float64")
    series = _horner(s2, tuple(2 / k / math.log(2) for k in (13, 11, 9, 7, 5, 3, 1)), _f64)
    return let(series * s + e, "float64")


def _exp2_wide(let: Let, x: TirExpr) -> TirExpr:
    """2^x of a float64 in -1000 .. 1000 with a relative error below 1e-9, rounded to float32."""
    n = let(round_even(x, "float64"), "float64")
    r = let((x - opaque(n, "float64")) * _f64(math.log(2)), "float64")
    y = let(_horner(r, tuple(1 / math.factorial(k) for k in (8, 7, 6, 5, 4, 3, 2, 1, 0)), _f64), "float64")
    exponent = tirx.Cast("int64", tirx.Cast("int32", n)) + tirx.IntImm("int64", 1023)
    scale = tirx.reinterpret("float64", exponent << tirx.IntImm("int64", 52))
    return tirx.Cast("float32", y * scale)


def power(let: Let, x: TirExpr, y: TirExpr) -> TirExpr:
    """x^y as C99's pow."""
    magnitude = let(tirx.abs(x), "float32")
    inf, zero = f32(math.inf), f32(0)
    log = let(_log2_wide(let, magnitude), "float64")
    at_zero = tirx.Select(tirx.EQ(magnitude, zero), _f64(-math.inf), log)
    exponent = let(tirx.Select(tirx.EQ(magnitude, inf), _f64(math.inf), at_zero) * tirx.Cast("float64", y), "float64")
    low = let(tirx.Select(tirx.GT(_f64(-400), exponent), _f64(-400), exponent), "float64")
    bounded = let(tirx.Select(tirx.LT(_f64(400), low), _f64(400), low), "float64")
    result = let(_exp2_wide(let, bounded), "float32")
    whole = let(tirx.EQ(tirx.floor(y), opaque(y, "float32")), "bool")
    half = let(y * f32(0.5), "float32")
    odd = tirx.And(whole, tirx.Not(tirx.EQ(tirx.floor(half), opaque(half, "float32"))))
    negative = tirx.LT(tirx.reinterpret("int32", x), _i32(0))
    signed = let(tirx.Select(tirx.And(negative, odd), zero - result, result), "float32")
    undefined = tirx.And(tirx.And(tirx.LT(x, zero), tirx.GT(x, f32(-math.inf))), tirx.Not(whole))
    defined = let(tirx.Select(undefined, f32(math.nan), signed), "float32")
    nan = tirx.Or(is_nan(x, "float32"), is_nan(y, "float32"))
    with_nan = let(tirx.Select(nan, x + y, defined), "float32")
    # (-1)^(+-inf) is 1 too.
    one_to = tirx.And(tirx.EQ(magnitude, f32(1)), tirx.EQ(tirx.abs(y), inf))
    is_one = tirx.Or(tirx.Or(tirx.EQ(y, zero), tirx.EQ(x, f32(1))), one_to)
    return tirx.Select(is_one, f32(1), with_nan)


UNARY: Mapping[str, Callable[[Let, TirExpr], TirExpr]] = {
    "exp": exp,
    "exp2": exp2,
    "exp_nonpositive": exp_nonpositive,
    "expm1": expm1,
    "log": log,
    "log2": log2,
    "log10": log10,
    "log1p": log1p,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "erfc": erfc,
    "sin": sin,
    "cos": cos,
    "tan": tan,
}
