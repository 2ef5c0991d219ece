"""Instructions of x86 that TVM has no operation for: dot products, conversions to bfloat16, table lookups, and AMX's.

An instruction is emitted as a call of LLVM's intrinsic, or of a small function in LLVM's text where the operands are vectors that TVM does not
have. Instruction sets are told by `isa.py`; a schedule asks there before it calls a function of this module.
"""

from __future__ import annotations

import struct

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.expressions import word_of

# TVM has no vectors of bfloat (LLVM would crash on TVM's own): the operands are words, and LLVM makes what it wants of them.
_BF16 = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @hybrid_dot_bf16(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
"""
_ROUND = """
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr <16 x i32> @hybrid_round_bf16(<16 x float> %low, <16 x float> %high) alwaysinline {
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %w = bitcast <32 x bfloat> %r to <16 x i32>
  ret <16 x i32> %w
}
"""
_ROUND_HALF = """
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
define linkonce_odr <16 x i16> @hybrid_round_half_bf16(<16 x float> %x) alwaysinline {
  %r = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %x)
  %w = bitcast <16 x bfloat> %r to <16 x i16>
  ret <16 x i16> %w
}
"""
_ALTERNATELY = ", ".join(f"i32 {lane + 16 * second}" for lane in range(16) for second in (0, 1))
_ROUND_PAIRS = f"""
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr <16 x i32> @hybrid_round_pairs_bf16(<16 x float> %first, <16 x float> %second) alwaysinline {{
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %second, <16 x float> %first)
  %i = bitcast <32 x bfloat> %r to <32 x i16>
  %p = shufflevector <32 x i16> %i, <32 x i16> poison, <32 x i32> <{_ALTERNATELY}>
  %w = bitcast <32 x i16> %p to <16 x i32>
  ret <16 x i32> %w
}}
"""
# A vector of four neighbouring pixels, 16 channels each, with the pixels of a channel together.
_CHANNELS_FIRST = ", ".join(f"i32 {16 * pixel + channel}" for channel in range(16) for pixel in range(4))
_TAPS = f"""
declare <64 x i8> @llvm.masked.load.v64i8.p0(ptr, i32 immarg, <64 x i1>, <64 x i8>)
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define linkonce_odr <16 x i32> @hybrid_dot_taps(<16 x i32> %sums, ptr %image, i32 %at, i64 %there, <16 x i32> %border,
    <16 x i32> %signs, <64 x i8> %w) alwaysinline {{
  %wide = sext i32 %at to i64
  %pixels = getelementptr i8, ptr %image, i64 %wide
  %mask = bitcast i64 %there to <64 x i1>
  %outside = bitcast <16 x i32> %border to <64 x i8>
  %x = call <64 x i8> @llvm.masked.load.v64i8.p0(ptr %pixels, i32 1, <64 x i1> %mask, <64 x i8> %outside)
  %y = shufflevector <64 x i8> %x, <64 x i8> poison, <64 x i32> <{_CHANNELS_FIRST}>
  %flip = bitcast <16 x i32> %signs to <64 x i8>
  %z = xor <64 x i8> %y, %flip
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sums, <64 x i8> %z, <64 x i8> %w)
  ret <16 x i32> %r
}}
"""
# Of each half of a word, what its lowest 4 bits stand for in two's complement; the permutation looks at one bit more.
_OF_NIBBLES = ", ".join(f"i16 {struct.unpack('<I', struct.pack('<f', (n + 8) % 16 - 8))[0] >> 16}" for n in range(32))
_NIBBLES = f"""
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
define linkonce_odr <16 x i32> @hybrid_bf16_of_nibbles(<16 x i32> %words) alwaysinline {{
  %halves = bitcast <16 x i32> %words to <32 x i16>
  %r = call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> <{_OF_NIBBLES}>, <32 x i16> %halves)
  %w = bitcast <32 x i16> %r to <16 x i32>
  ret <16 x i32> %w
}}
"""
# By lanes, from here on: blocks of output channels may be narrower than the processor's vectors.
_MADD_BYTES = {
    4: "llvm.x86.ssse3.pmadd.ub.sw.128",
    8: "llvm.x86.avx2.pmadd.ub.sw",
    16: "llvm.x86.avx512.pmaddubs.w.512",
}
_MADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


# By lanes: each lane of the result is the element of a vector of float32 that the lane's lowest bits say.
_PERMUTE = {8: "llvm.x86.avx2.permps", 16: "llvm.x86.avx512.permvar.sf.512"}


def dot_product(
    builder: Builder, instruction: str, lanes: int, total: TirExpr, left: TirExpr, right: TirExpr
) -> TirExpr:
    """total + the products of `left`, words, and `right`, in every lane, by an instruction of `dot_products.DotProduct`."""
    match instruction:
        case "vpdpbusd":
            left = tirx.reinterpret(f"int8x{lanes * 4}", left)
            intrinsic = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"
            return tirx.call_llvm_pure_intrin(f"int32x{lanes}", intrinsic, total, left, right)
        case "vpmaddubsw":
            left, pairs = tirx.reinterpret(f"int8x{lanes * 4}", left), f"int16x{lanes * 2}"
            sums = tirx.call_llvm_pure_intrin(pairs, _MADD_BYTES[lanes], left, right)
            return total + tirx.call_llvm_pure_intrin(f"int32x{lanes}", _MADD[lanes], sums, tirx.const(1, pairs))
        case "vpmaddwd":
            left = tirx.reinterpret(f"int16x{lanes * 2}", left)
            return total + tirx.call_llvm_pure_intrin(f"int32x{lanes}", _MADD[lanes], left, right)
        case "vdpbf16ps":
            builder.llvm_helpers[_BF16] = None
            right = tirx.reinterpret(f"int32x{lanes}", right)
            return tirx.call_pure_extern(f"float32x{lanes}", "hybrid_dot_bf16", total, left, right)
    raise ValueError(
        f"{instruction!r} is no dot product of x86; there are vpdpbusd, vpmaddubsw, vpmaddwd and vdpbf16ps"
    )


def rounded_words(builder: Builder, low: TirExpr, high: TirExpr) -> TirExpr:
    """Two vectors of 16 float32 as 32 bfloat16 in words, rounded to nearest even: by AVX512-BF16, which takes denormal numbers for 0."""
    builder.llvm_helpers[_ROUND] = None
    return tirx.call_pure_extern("int32x16", "hybrid_round_bf16", low, high)


def rounded_pairs(builder: Builder, first: TirExpr, second: TirExpr) -> TirExpr:
    """Two vectors of 16 float32 as 16 pairs of bfloat16 in words, those of `first` in the lower halves; by AVX512-BF16, as `rounded_words`."""
    builder.llvm_helpers[_ROUND_PAIRS] = None
    return tirx.call_pure_extern("int32x16", "hybrid_round_pairs_bf16", first, second)


def rounded_vector(builder: Builder, x: TirExpr) -> TirExpr:
    """16 float32 as bfloat16, as bits, rounded to nearest even: by AVX512-BF16, which takes denormal numbers for 0."""
    builder.llvm_helpers[_ROUND_HALF] = None
    return tirx.call_pure_extern("uint16x16", "hybrid_round_half_bf16", x)


def bf16_of_nibbles(builder: Builder, words: TirExpr) -> TirExpr:
    """The integers, -8 to 7, in the lowest 4 bits of both halves of 16 words, as pairs of bfloat16 in words. Needs AVX512-BW."""
    builder.llvm_helpers[_NIBBLES] = None
    return tirx.call_pure_extern("int32x16", "hybrid_bf16_of_nibbles", words)


def dot_taps(
    builder: Builder, image: TirBuffer, offset: TirExpr, taps: range, border: int, weights: TirExpr, total: TirExpr
) -> TirExpr:
    """total + the products of up to four neighbouring pixels, 16 channels of 8 bits each, by int8 weights, (16, 4), channel by channel.

    `offset`: where the first of them begins, which may lie outside of the image. Only those of `taps`, of 0 .. 3, are read; the others count as
    `border`. Signed pixels count as 128 more than they are. Needs AVX-512 VNNI.
    """
    builder.llvm_helpers[_TAPS] = None

    signs = word_of(0x80 if str(image.dtype) == "int8" else 0, 4, 16)
    there = sum(0xFFFF << (16 * tap) for tap in taps)
    mask = tirx.IntImm("int64", there - (1 << 64) if there >> 63 else there)
    # An address of TVM's own would promise to lie within the image.
    base = tirx.address_of(tirx.BufferLoad(image, [tirx.IntImm("int32", 0)]))
    return tirx.call_pure_extern(
        "int32x16", "hybrid_dot_taps", total, base, offset, mask, word_of(border, 4, 16), signs, weights
    )


def looked_up(values: TirExpr, place: TirExpr, lanes: int) -> TirExpr:
    """The element of the vector `values`, `lanes` float32, that the lowest bits of the int32 `place` name, in a vectorised loop of `lanes`."""
    return tirx.call_llvm_pure_intrin("float32", _PERMUTE[lanes], values, place)


def amx(name: str, *operands: TirExpr) -> Stmt:
    """An instruction of AMX, by LLVM's name. `schedules/amx/instructions.py` has them all; tests put an emulation in its place."""
    return tirx.Evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))
