"""Dtypes of the arrays that hold tensors' elements: bool as uint8, bfloat16 as its bits, every other dtype as itself.

bfloat16 and float16 are widened to float32 at loads and rounded to nearest even at stores.
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


def narrow(value: TirExpr, dtype: str) -> TirExpr:
    """A scalar of the compute dtype of `dtype` as the array stores it, rounded to nearest even."""
    if dtype == "bool":
        return tirx.Select(value, tirx.IntImm("uint8", 1), tirx.IntImm("uint8", 0))
    if dtype == "bfloat16":
        bits = tirx.reinterpret("uint32", value)
        sixteen, one = tirx.IntImm("uint32", 16), tirx.IntImm("uint32", 1)
        odd = tirx.bitwise_and(tirx.shift_right(bits, sixteen), one)
        rounded = tirx.shift_right(bits + tirx.IntImm("uint32", 0x7FFF) + odd, sixteen)
        # Rounding could carry a NaN over into infinity.
        return tirx.Cast("uint16", tirx.Select(is_nan(value, "float32"), tirx.IntImm("uint32", 0x7FC0), rounded))
    return value if compute_dtype(dtype) == dtype else tirx.Cast(dtype, value)


def widen(value: TirExpr, dtype: str) -> TirExpr:
    """An element of the array as a scalar of the compute dtype of `dtype`."""
    if dtype == "bool":
        return tirx.NE(value, tirx.IntImm("uint8", 0))
    if dtype == "bfloat16":
        return tirx.reinterpret("float32", tirx.shift_left(tirx.Cast("uint32", value), tirx.IntImm("uint32", 16)))
    return value if compute_dtype(dtype) == dtype else tirx.Cast(compute_dtype(dtype), value)
