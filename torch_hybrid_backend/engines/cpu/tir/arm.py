"""Dot products of AArch64, by LLVM's intrinsics; and the same sums as arithmetic, for machines without these instructions.

Source: Arm Architecture Reference Manual for A-profile, C7.2: SDOT, UDOT, USDOT (vector).
"""

from __future__ import annotations

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import Builder, TirExpr

# Of each instruction, how the bytes of its left and its right operand are widened.
_WIDENED = {"sdot": ("sext", "sext"), "udot": ("zext", "zext"), "usdot": ("zext", "sext")}
_HEAD = "define linkonce_odr <4 x i32> @hybrid_{name}(<4 x i32> %c, <16 x i8> %a, <16 x i8> %b) alwaysinline {{"


def dot_product(
    builder: Builder, instruction: str, lanes: int, total: TirExpr, left: TirExpr, right: TirExpr
) -> TirExpr:
    """total + the products of `left`, words, and `right`, in each of 4 lanes, by an instruction of `dot_products.DotProduct`."""
    if instruction not in _WIDENED or lanes != 4:
        raise ValueError(
            f"{instruction!r} in {lanes} lanes is no dot product of AArch64; there are {', '.join(_WIDENED)}, in 4 lanes"
        )
    builder.llvm_helpers[_arithmetic(instruction) if builder.emulates else _intrinsic(instruction)] = None
    left = tirx.reinterpret("int8x16", left)
    return tirx.call_pure_extern("int32x4", f"hybrid_{instruction}", total, left, tirx.reinterpret("int8x16", right))


def _intrinsic(name: str) -> str:
    full = f"@llvm.aarch64.neon.{name}.v4i32.v16i8"
    # LLVM finds the form that takes a word from a lane (SDOT by element, SUDOT for USDOT) where the intrinsic has it in this place.
    operands = "<16 x i8> %a, <16 x i8> %b" if name == "usdot" else "<16 x i8> %b, <16 x i8> %a"
    return f"""
declare <4 x i32> {full}(<4 x i32>, <16 x i8>, <16 x i8>)
{_HEAD.format(name=name)}
  %r = call <4 x i32> {full}(<4 x i32> %c, {operands})
  ret <4 x i32> %r
}}
"""


def _arithmetic(name: str) -> str:
    left, right = _WIDENED[name]
    lines = [f"%x = {left} <16 x i8> %a to <16 x i32>", f"%y = {right} <16 x i8> %b to <16 x i32>"]
    lines.append("%p = mul <16 x i32> %x, %y")
    before = "%c"
    for j in range(4):
        places = ", ".join(f"i32 {4 * lane + j}" for lane in range(4))
        lines.append(f"%q{j} = shufflevector <16 x i32> %p, <16 x i32> poison, <4 x i32> <{places}>")
        lines.append(f"%s{j} = add <4 x i32> {before}, %q{j}")
        before = f"%s{j}"
    body = "\n  ".join([*lines, f"ret <4 x i32> {before}"])
    return f"\n{_HEAD.format(name=name)}\n  {body}\n}}\n"
