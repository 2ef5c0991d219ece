"""The scalar operations of `loops.ops` in Triton's language: a template for each, and the functions that templates call.

Templates are over `{0}`, `{1}`, ... (operands: names or literals, each already of its dtype) and `{type}`, the result's dtype. Semantics are
PyTorch's, as `loops.ops` says. What Triton has only as a function of NVIDIA's libdevice is `libdevice.NAME`, which `interpreted.py` has a
substitute of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.ir import FLOAT8
from torch_hybrid_backend.loops.ops import is_float

# dtype -> (in Triton's language, in a kernel's signature)
DTYPES: Mapping[str, tuple[str, str]] = {
    "bool": ("tl.int1", "i1"),
    "uint8": ("tl.uint8", "u8"),
    "int8": ("tl.int8", "i8"),
    "int16": ("tl.int16", "i16"),
    "int32": ("tl.int32", "i32"),
    "int64": ("tl.int64", "i64"),
    "float16": ("tl.float16", "fp16"),
    "bfloat16": ("tl.bfloat16", "bf16"),
    "float32": ("tl.float32", "fp32"),
    "float64": ("tl.float64", "fp64"),
    # As bits: see `from_float8_e4m3fn`.
    "float8_e4m3fn": ("tl.uint8", "u8"),
    "float8_e5m2": ("tl.uint8", "u8"),
}

# Functions that kernels may call, each in Triton's language; a kernel's text holds those that it calls.
FUNCTIONS: Mapping[str, str] = {
    # Floats of 8 bits are converted by arithmetic on their bits, as PyTorch does it everywhere: instructions of GPUs saturate e5m2, and
    # those for e4m3 need compute capability 8.9. The formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    "from_float8_e4m3fn": '''
@triton.jit
def from_float8_e4m3fn(bits):
    """1 bit of sign, 4 of an exponent over 2^-7, 3 more; the largest pattern is NaN, and there is no infinity."""
    wide = bits.to(tl.int32)
    size = wide & 127
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 127, float('nan'), value)
    return (value.to(tl.int32, bitcast=True) | ((wide & 128) << 24)).to(tl.float32, bitcast=True)
''',
    "to_float8_e4m3fn": '''
@triton.jit
def to_float8_e4m3fn(x):
    """To the nearest, ties to even; what is larger than the largest number, 448, becomes that."""
    wide = x.to(tl.int32, bitcast=True)
    size = wide & 0x7fffffff
    # An addition rounds to the spacing of denormals, 2^-9.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    normal = (size - (120 << 23) + ((size >> 20) & 1) + 0x7ffff) >> 20
    bits = tl.where(size < (121 << 23), small, normal)
    bits = tl.where(size >= (1087 << 20), 126, tl.minimum(bits, 126))
    bits = tl.where(size > (255 << 23), 127, bits)
    return (bits | ((wide >> 24) & 128)).to(tl.uint8)
''',
    "from_float8_e5m2": '''
@triton.jit
def from_float8_e5m2(bits):
    """The upper half of a float16."""
    return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
''',
    "to_float8_e5m2": '''
@triton.jit
def to_float8_e5m2(x):
    """To the nearest, ties to even; infinity from 61440 on, the middle between the largest number and what would be the next."""
    wide = x.to(tl.int32, bitcast=True)
    size = wide & 0x7fffffff
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - (134 << 23)
    normal = (size - (112 << 23) + ((size >> 21) & 1) + 0xfffff) >> 21
    bits = tl.where(size < (113 << 23), small, normal)
    bits = tl.where(size >= (143 << 23), 124, bits)
    bits = tl.where(size > (255 << 23), 127, bits)
    return (bits | ((wide >> 24) & 128)).to(tl.uint8)
''',
    "floor_divide": '''
@triton.jit
def floor_divide(a, b):
    """a / b rounded towards minus infinity; `//` rounds towards zero."""
    rest = a % b
    return a // b - ((rest != 0) & ((rest < 0) != (b < 0))).to(a.dtype)
''',
    "floor_remainder": '''
@triton.jit
def floor_remainder(a, b):
    """What `floor_divide` leaves: it has the sign of b, where `%` has that of a."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
''',
    "float_remainder": '''
@triton.jit
def float_remainder(a, b):
    """a - floor(a / b) b, with the sign of b."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
''',
    "float_floor_divide": '''
@triton.jit
def float_floor_divide(a, b):
    """floor(a / b) as c10::div_floor_floating: of what is left when the remainder is taken off, nudged to the nearest integer."""
    rest = libdevice.fmod(a, b)
    rest = tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    exact = (a - rest) / b
    whole = tl.floor(exact)
    return tl.where(b == 0, a / b, tl.where(exact - whole > 0.5, whole + 1, whole))
''',
    "integer_power": '''
@triton.jit
def integer_power(a, b, BITS: tl.constexpr):
    """a to the power b modulo 2^bits; 0 for negative b unless a is 1 or -1."""
    one = (a * 0 + 1).to(a.dtype)
    result, base = one, a
    for bit in tl.static_range(BITS):
        result = tl.where(((b >> bit) & 1) == 0, result, result * base).to(a.dtype)
        base = (base * base).to(a.dtype)
    parity = tl.where((b & 1) == 0, one, -one)
    negative = tl.where(a == 1, one, tl.where(a == one * 0 - one, parity, one * 0))
    return tl.where(b < 0, negative, result).to(a.dtype)
''',
    "larger": '''
@triton.jit
def larger(a, b):
    """The larger one; NaN where one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "smaller": '''
@triton.jit
def smaller(a, b):
    """The smaller one; NaN where one is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "plus": """
@triton.jit
def plus(a, b):
    return a + b
""",
    "log_add_exp": '''
@triton.jit
def log_add_exp(a, b):
    """log(exp(a) + exp(b)); of equal infinities, that infinity."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    total = top + libdevice.log1p(libdevice.exp(low - top))
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, total)
''',
    "later_largest": '''
@triton.jit
def later_largest(a, a_at, b, b_at):
    """The larger one and its position; the later of equals. A NaN is larger than all."""
    taken = (b >= a) | (b != b)
    return tl.where(taken, b, a), tl.where(taken, b_at, a_at)
''',
    "later_smallest": '''
@triton.jit
def later_smallest(a, a_at, b, b_at):
    """The smaller one and its position; the later of equals. A NaN is smaller than all."""
    taken = (b <= a) | (b != b)
    return tl.where(taken, b, a), tl.where(taken, b_at, a_at)
''',
    "multiply": """
@triton.jit
def multiply(a, b):
    return a * b
""",
    "random_place": '''
@triton.jit
def random_place(position, threads, vector, per_group):
    """The group, the thread and the place in the group of an element. Unsigned: then it shows that neighbours have a group in common."""
    if position.dtype == tl.int64:
        position, threads = position.to(tl.uint64), threads.to(tl.uint64)
        vector, per_group = vector.to(tl.uint64), per_group.to(tl.uint64)
    else:
        position, threads = position.to(tl.uint32), threads.to(tl.uint32)
        vector, per_group = vector.to(tl.uint32), per_group.to(tl.uint32)
    neighbour, column = position % vector, position // vector
    turn, thread = column // threads, column % threads
    groups = (vector + per_group - 1) // per_group
    group = tl.where(vector == 1, turn // per_group, turn * groups + neighbour // per_group)
    lane = tl.where(vector == 1, turn % per_group, neighbour % per_group)
    return group.to(tl.int64), thread.to(tl.uint32), lane
''',
    "random_words": '''
@triton.jit
def random_words(seed, counter, group, thread):
    """The four 32-bit numbers of a group of a thread, by Philox4x32-10."""
    at = counter + group
    return tl.philox(seed, at.to(tl.uint32), (at >> 32).to(tl.uint32), thread, (thread * 0).to(tl.uint32))
''',
    "random_uniform": '''
@triton.jit
def random_uniform(seed, counter, position, threads, vector, per_group):
    """cuRAND's float in (0, 1]: x / 2^32 + 1 / 2^33."""
    group, thread, lane = random_place(position, threads, vector, per_group)
    first, second, third, fourth = random_words(seed, counter, group, thread)
    word = tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
''',
    "random_uniform_double": '''
@triton.jit
def random_uniform_double(seed, counter, position, threads, vector, per_group):
    """cuRAND's double in (0, 1], of 53 bits of two numbers."""
    group, thread, lane = random_place(position, threads, vector, per_group)
    first, second, third, fourth = random_words(seed, counter, group, thread)
    low, high = tl.where(lane == 0, first, third).to(tl.uint64), tl.where(lane == 0, second, fourth).to(tl.uint64)
    return (low ^ (high << 21)).to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17
''',
    "random_normal": '''
@triton.jit
def random_normal(seed, counter, position, threads, vector, per_group):
    """cuRAND's method of Box and Muller: two numbers give two, the first one by the sine, both by functions that are fast and approximate."""
    group, thread, lane = random_place(position, threads, vector, per_group)
    first, second, third, fourth = random_words(seed, counter, group, thread)
    x, y = tl.where(lane < 2, first, third).to(tl.float32), tl.where(lane < 2, second, fourth).to(tl.float32)
    distance = tl.sqrt_rn(-2.0 * libdevice.log(x * 2.3283064365386963e-10 + 1.1641532182693481e-10))
    # 2 pi / 2^32 and half of it, of which 2 pi is rounded to float32.
    angle = y * 1.462918078360668e-09 + 7.31459039180334e-10
    return distance * tl.where((lane % 2) == 0, libdevice.fast_sinf(angle), libdevice.fast_cosf(angle))
''',
}


def texts(used: Collection[str]) -> list[str]:
    """The functions of these names, and those that they call, each after those that it calls."""
    needed: set[str] = set()
    for name in reversed([*FUNCTIONS]):  # callers come after what they call
        if name in used or any(f"{name}(" in FUNCTIONS[caller] for caller in needed):
            needed.add(name)
    return [text for name, text in FUNCTIONS.items() if name in needed]


_FLOAT: Mapping[str, str] = {
    "exp": "tl.exp({0})",
    "exp_nonpositive": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "1 / tl.sqrt_rn({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "sigmoid": "tl.sigmoid({0})",
    "round_even": "libdevice.nearbyint({0})",
    "neg": "{0} * -1.0",  # `-` is 0 - x, which makes 0 of 0
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({type})",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
    "div": "{0} / {1}",
    "truncdiv": "libdevice.trunc({0} / {1})",
    "floordiv": "float_floor_divide({0}, {1})",
    "mod": "float_remainder({0}, {1})",
    "fmod": "libdevice.fmod({0}, {1})",
    "pow": "libdevice.pow({0}, {1})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "fma": "{0} * {1} + {2}",
    **{
        name: f"libdevice.{name}({{0}})"
        for name in "expm1 log10 log1p tan asin acos atan sinh cosh tanh asinh acosh atanh erfc trunc".split()
    },
    "atan2": "libdevice.atan2({0}, {1})",
}
# tl's sin, cos, exp and their like take float32 and are approximate; of float64 libdevice has them.
_DOUBLE: Mapping[str, str] = {
    **{name: f"libdevice.{name}({{0}})" for name in "exp exp2 log log2 sqrt sin cos erf".split()},
    "exp_nonpositive": "libdevice.exp({0})",
    "rsqrt": "1 / libdevice.sqrt({0})",
    "sigmoid": "1 / (1 + libdevice.exp(-{0}))",
}
_INTEGER: Mapping[str, str] = {
    "neg": "0 - {0}",
    "abs": "tl.where({0} < 0, 0 - {0}, {0})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({type})",
    "bitnot": "~{0}",
    "truncdiv": "{0} // {1}",
    "div": "{0} // {1}",
    "floordiv": "floor_divide({0}, {1})",
    "mod": "floor_remainder({0}, {1})",
    "fmod": "{0} % {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "floor": "{0}",
    "ceil": "{0}",
    "trunc": "{0}",
    "round_even": "{0}",
    "bitand": "{0} & {1}",
    "bitor": "{0} | {1}",
    "bitxor": "{0} ^ {1}",
    "fma": "{0} * {1} + {2}",
}
# Unsigned ones have no sign to round towards.
_UNSIGNED: Mapping[str, str] = {
    "abs": "{0}",
    "bitnot": "{0} ^ 255",
    "sign": "({0} > 0).to({type})",
    "floordiv": "{0} // {1}",
    "mod": "{0} % {1}",
}
_BOOL: Mapping[str, str] = {
    "add": "{0} | {1}",
    "mul": "{0} & {1}",
    "bitand": "{0} & {1}",
    "bitor": "{0} | {1}",
    "bitxor": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} != {1}",
    "max": "{0} | {1}",
    "min": "{0} & {1}",
    "not": "{0} == 0",
    "bitnot": "{0} == 0",
    "sign": "{0}",
    "abs": "{0}",
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIMPLE = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}"}
_NARROW = ("int8", "uint8", "int16")
_RANDOM: Mapping[tuple[str, str], str] = {
    ("random_uniform", "float32"): "random_uniform({0}, {1}, {2}, {3}, {4}, {5})",
    ("random_uniform", "float64"): "random_uniform_double({0}, {1}, {2}, {3}, {4}, {5})",
    ("random_normal", "float32"): "random_normal({0}, {1}, {2}, {3}, {4}, {5})",
}


def template(op: str, dtype: str, operand: str) -> str:
    """The expression for `op` of result dtype `dtype`; `operand` is the first operand's. "cast", "round" and "guard" are the printer's.

    Raises ScheduleError for an operation and dtype that have no meaning together.
    """
    if op in _COMPARE:
        return f"{{0}} {_COMPARE[op]} {{1}}"
    if op == "where":
        return "tl.where({0}, {1}, {2})"
    if (op, dtype) in _RANDOM:
        return _RANDOM[op, dtype]
    if op in ("isnan", "isinf") and not is_float(operand):
        return "{0} != {0}"
    if op in ("and", "or", "xor", "not"):
        return _BOOL[op]
    if op in ("isnan", "isinf"):
        return _FLOAT[op]
    tables: tuple[Mapping[str, str], ...]
    if operand == "bool":
        tables = (_BOOL,)
    elif is_float(dtype):
        tables = (_DOUBLE, _SIMPLE, _FLOAT) if dtype == "float64" else (_SIMPLE, _FLOAT)
    else:
        tables = (_UNSIGNED, _SIMPLE, _INTEGER) if dtype == "uint8" else (_SIMPLE, _INTEGER)
        if (found := _of_bits(op, dtype)) is not None:
            return found
    for table in tables:
        if op in table:
            return table[op]
    raise ScheduleError(f"the scalar operation {op!r} has no code for dtype {dtype}")


def _of_bits(op: str, dtype: str) -> str | None:
    """Operations that depend on how many bits an integer has."""
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    inside = f"({{1}} >= 0) & ({{1}} < {bits})"
    if op == "shl":  # by a negative count or all bits: 0
        return f"tl.where({inside}, {{0}} << tl.where({inside}, {{1}}, 0).to({{type}}), 0).to({{type}})"
    if op == "shr" and dtype == "uint8":
        return f"tl.where({inside}, {{0}} >> tl.where({inside}, {{1}}, 0).to({{type}}), 0).to({{type}})"
    if op == "shr":  # the sign is left
        return f"({{0}} >> tl.where({inside}, {{1}}, {bits - 1}).to({{type}})).to({{type}})"
    if op == "pow":
        return f"integer_power({{0}}, {{1}}, {bits if dtype == 'uint8' else bits - 1})"
    return None


def converted(value: str, source: str, target: str) -> str:
    """A value converted as C would; a float to a narrow integer through int32, so that what is out of range wraps as eager's does."""
    if source == target:
        return value
    if target in FLOAT8:
        return f"to_{target}({value})"
    if target == "bool":
        return f"{value} != 0"
    if is_float(source) and target in _NARROW:
        return f"{value}.to(tl.int32).to({DTYPES[target][0]})"
    return f"{value}.to({DTYPES[target][0]})"
