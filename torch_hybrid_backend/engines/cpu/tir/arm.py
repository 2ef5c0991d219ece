"""Products of AArch64 by LLVM's intrinsics, as `dot_products` has them; and the same sums as arithmetic, for machines without them.

Sums of integers are exact in both. bfdot adds two products, and that to the lane's sum; bfmmla does so twice. The arithmetic has this order,
and rounds to nearest; the instructions round to odd, and take denormal numbers for 0. So results differ by roundings of float32.

Source: Arm Architecture Reference Manual for A-profile, C7.2: SDOT, UDOT, USDOT, BFDOT (vector), SMMLA, UMMLA, USMMLA, BFMMLA.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import Builder, TirExpr

# Of each instruction on bytes, how those of its left and its right operand are widened.
_WIDENED = {"sdot": ("sext", "sext"), "udot": ("zext", "zext"), "usdot": ("zext", "sext")}
# Those of blocks of 2 x 2 multiply as these do.
_OF_PAIRS = {"smmla": "sdot", "ummla": "udot", "usmmla": "usdot", "bfmmla": "bfdot"}
# Those that LLVM exchanges the factors of, or that need not be.
_BY_ELEMENT = ("sdot", "udot", "bfdot")
_OF_BFLOAT = ("bfdot", "bfmmla")
_ALL = (*_WIDENED, "bfdot", *_OF_PAIRS)


def dot_product(
    builder: Builder, instruction: str, lanes: int, total: TirExpr, left: TirExpr, right: TirExpr
) -> TirExpr:
    """total + the products of `left`, words, and `right`, in each of 4 lanes, by an instruction of `dot_products.DotProduct`."""
    if instruction not in _ALL or lanes != 4:
        raise ValueError(
            f"{instruction!r} in {lanes} lanes is no dot product of AArch64; there are {', '.join(_ALL)}, in 4 lanes"
        )
    builder.llvm_helpers[_arithmetic(instruction) if builder.emulates else _intrinsic(instruction)] = None
    dtype = "float32x4" if instruction in _OF_BFLOAT else "int32x4"
    # TVM has no vectors of bfloat: operands are words, and LLVM makes what it wants of them.
    return tirx.call_pure_extern(dtype, f"hybrid_{instruction}", total, left, tirx.reinterpret("int32x4", right))


def _sums(name: str) -> str:
    """LLVM's type of an instruction's sums."""
    return "<4 x float>" if name in _OF_BFLOAT else "<4 x i32>"


def _function(name: str, lines: Sequence[str]) -> str:
    """LLVM's text of a function of sums %c and words %a and %b, which returns %r."""
    sums = _sums(name)
    head = f"define linkonce_odr {sums} @hybrid_{name}({sums} %c, <4 x i32> %a, <4 x i32> %b) alwaysinline {{"
    return "\n  ".join(["", head, *lines, f"ret {sums} %r"]) + "\n}\n"


def _intrinsic(name: str) -> str:
    sums, operands = _sums(name), "<8 x bfloat>" if name in _OF_BFLOAT else "<16 x i8>"
    suffix = {"bfdot": ".v4f32.v8bf16", "bfmmla": ""}.get(name, ".v4i32.v16i8")
    full = f"@llvm.aarch64.neon.{name}{suffix}"
    lines = [f"%{to} = bitcast <4 x i32> %{word} to {operands}" for to, word in ("xa", "yb")]
    # LLVM finds the form that takes a word from a lane (SDOT by element, SUDOT for USDOT) where the intrinsic has it in this place.
    factors = f"{operands} %y, {operands} %x" if name in _BY_ELEMENT else f"{operands} %x, {operands} %y"
    lines.append(f"%r = call {sums} {full}({sums} %c, {factors})")
    return f"\ndeclare {sums} {full}({sums}, {operands}, {operands}){_function(name, lines)}"


def _arithmetic(name: str) -> str:
    if name in _OF_PAIRS:
        return _arithmetic(_OF_PAIRS[name]) + _function(name, _sums_of_blocks(name))
    return _function(name, _sums_of_pairs() if name in _OF_BFLOAT else _sums_of_bytes(*_WIDENED[name]))


def _sums_of_blocks(name: str) -> list[str]:
    """Two dot products, of the first and of the second words of rows and columns, in the order in which the instruction adds them."""
    sums, lines, before = _sums(name), [], "%c"
    for word, after in ((0, "%first"), (1, "%r")):
        for operand, lanes in (("a", (0, 0, 2, 2)), ("b", (0, 2, 0, 2))):
            places = ", ".join(f"i32 {lane + word}" for lane in lanes)
            lines.append(
                f"%{operand}{word} = shufflevector <4 x i32> %{operand}, <4 x i32> poison, <4 x i32> <{places}>"
            )
        call = f"call {sums} @hybrid_{_OF_PAIRS[name]}({sums} {before}, <4 x i32> %a{word}, <4 x i32> %b{word})"
        lines.append(f"{after} = {call}")
        before = after
    return lines


def _sums_of_bytes(left: str, right: str) -> list[str]:
    lines = ["%i = bitcast <4 x i32> %a to <16 x i8>", "%j = bitcast <4 x i32> %b to <16 x i8>"]
    lines += [f"%x = {left} <16 x i8> %i to <16 x i32>", f"%y = {right} <16 x i8> %j to <16 x i32>"]
    lines.append("%p = mul <16 x i32> %x, %y")
    before = "%c"
    for j in range(4):
        places = ", ".join(f"i32 {4 * lane + j}" for lane in range(4))
        after = f"%s{j}" if j < 3 else "%r"
        lines.append(f"%q{j} = shufflevector <16 x i32> %p, <16 x i32> poison, <4 x i32> <{places}>")
        lines.append(f"{after} = add <4 x i32> {before}, %q{j}")
        before = after
    return lines


def _sums_of_pairs() -> list[str]:
    """Halves of words become float32 by moving their bits: LLVM's conversion would call a function on some machines."""
    lines = []
    for word in "ab":
        lines += [
            f"%{word}0 = shl <4 x i32> %{word}, splat (i32 16)",
            f"%{word}1 = and <4 x i32> %{word}, splat (i32 -65536)",
            *(f"%{word}f{side} = bitcast <4 x i32> %{word}{side} to <4 x float>" for side in (0, 1)),
        ]
    products = [f"%p{side} = fmul <4 x float> %af{side}, %bf{side}" for side in (0, 1)]
    return [*lines, *products, "%s = fadd <4 x float> %p0, %p1", "%r = fadd <4 x float> %c, %s"]
