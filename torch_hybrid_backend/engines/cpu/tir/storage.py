"""Dtypes of the arrays that hold tensors' elements: bool as uint8, bfloat16 as its bits, every other dtype as itself.

bfloat16 and float16 are widened to float32 at loads and rounded to nearest even at stores. Where no instruction converts float16
(`computes_float16`), it is computed, as bfloat16 is: LLVM calls functions there, of which TVM 0.27 brings some that take their argument in
another register than LLVM gives it in.

Source: IEEE 754-2019, 3.4: binary16 and binary32.
"""

from __future__ import annotations

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import TirExpr
from torch_hybrid_backend.engines.cpu.tir.math import is_nan
from torch_hybrid_backend.loops.ir import compute_dtype

# bfloat16 is handled as bits: TVM's legaliser of bfloat16 leaves a bound load (`Bind(v, Cast("float32", load))`) as an integer converted to
# float (apache-tvm 0.27).
_STORAGE = {"bool": "uint8", "bfloat16": "uint16"}


def storage_dtype(dtype: str) -> str:
    """The dtype of the array that holds a tensor's elements."""
    return _STORAGE.get(dtype, dtype)


def narrow(value: TirExpr, dtype: str, *, computes_float16: bool = False) -> TirExpr:
    """A scalar of the compute dtype of `dtype` as the array stores it, rounded to nearest even. Arithmetic that
    rounds has the value several times."""
    if dtype == "bool":
        return tirx.Select(value, tirx.IntImm("uint8", 1), tirx.IntImm("uint8", 0))
    if dtype == "bfloat16":
        bits = tirx.reinterpret("uint32", value)
        sixteen, one = tirx.IntImm("uint32", 16), tirx.IntImm("uint32", 1)
        odd = tirx.bitwise_and(tirx.shift_right(bits, sixteen), one)
        rounded = tirx.shift_right(bits + tirx.IntImm("uint32", 0x7FFF) + odd, sixteen)
        # Rounding could carry a NaN over into infinity.
        return tirx.Cast("uint16", tirx.Select(is_nan(value, "float32"), tirx.IntImm("uint32", 0x7FC0), rounded))
    if dtype == "float16" and computes_float16:
        return _to_float16(value)
    return value if compute_dtype(dtype) == dtype else tirx.Cast(dtype, value)


def widen(value: TirExpr, dtype: str, *, computes_float16: bool = False) -> TirExpr:
    """An element of the array as a scalar of the compute dtype of `dtype`."""
    if dtype == "bool":
        return tirx.NE(value, tirx.IntImm("uint8", 0))
    if dtype == "bfloat16":
        return tirx.reinterpret("float32", tirx.shift_left(tirx.Cast("uint32", value), tirx.IntImm("uint32", 16)))
    if dtype == "float16" and computes_float16:
        return _of_float16(value)
    return value if compute_dtype(dtype) == dtype else tirx.Cast(compute_dtype(dtype), value)


def _to_float16(value: TirExpr) -> TirExpr:
    """A float32 rounded to float16."""
    bits = tirx.reinterpret("uint32", value)
    magnitude = tirx.bitwise_and(bits, _u32(0x7FFFFFFF))
    odd = tirx.bitwise_and(tirx.shift_right(magnitude, _u32(13)), _u32(1))
    # The exponent becomes 112 less.
    normal = tirx.shift_right(magnitude + _u32(0xFFF) + odd, _u32(13)) - _u32(112 << 10)
    # The sum with 0.5 is rounded to a multiple of 2^-24, as denormal numbers are.
    half = tirx.FloatImm("float32", 0.5)
    denormal = tirx.reinterpret("uint32", tirx.reinterpret("float32", magnitude) + half) - _u32(0x3F000000)
    finite = tirx.Select(tirx.LT(magnitude, _u32(0x38800000)), denormal, normal)  # 2^-14
    number = tirx.Select(tirx.LT(magnitude, _u32(0x477FF000)), finite, _u32(0x7C00))  # 65520, half way to 2^16
    known = tirx.Select(tirx.LE(magnitude, _u32(0x7F800000)), number, _u32(0x7E00))
    sign = tirx.bitwise_and(tirx.shift_right(bits, _u32(16)), _u32(0x8000))
    return tirx.reinterpret("float16", tirx.Cast("uint16", tirx.bitwise_or(sign, known)))


def _of_float16(value: TirExpr) -> TirExpr:
    """A float16 as float32."""
    bits = tirx.Cast("uint32", tirx.reinterpret("uint16", value))
    magnitude = tirx.bitwise_and(bits, _u32(0x7FFF))
    # In its place, the exponent is 112 too small: the product is exact, of denormal numbers too.
    placed = tirx.shift_left(magnitude, _u32(13))
    scaled = tirx.reinterpret("uint32", tirx.reinterpret("float32", placed) * tirx.FloatImm("float32", 2.0**112))
    known = tirx.Select(tirx.LT(magnitude, _u32(0x7C00)), scaled, tirx.bitwise_or(placed, _u32(0x7F800000)))
    sign = tirx.shift_left(tirx.bitwise_and(bits, _u32(0x8000)), _u32(16))
    return tirx.reinterpret("float32", tirx.bitwise_or(sign, known))


def _u32(value: int) -> TirExpr:
    return tirx.IntImm("uint32", value)
