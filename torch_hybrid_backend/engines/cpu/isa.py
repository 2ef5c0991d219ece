"""Isa: what kernels may use of a processor, by its instruction sets.

Names of instruction set extensions stand here, and in `machine.py`, which tells what the operating system and PyTorch let a process use.
Everything else asks a property of `Target.isa`. A way of computing that an instruction set has no property for is refused by that property, and
another kernel takes its place. `tir/x86.py` and `tir/arm.py` emit the instructions. Nothing here imports TVM or torch.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapters 14 to 18; Arm Architecture Reference Manual for
A-profile, B1.2 (32 registers of 128 bits); The RISC-V Instruction Set Manual, volume I, "V" (32 registers of at least 128 bits).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# LLVM's name of an extension -> Linux's. Only those that LLVM might use in a kernel unasked, and AMX-FP16. Linux has no names for that,
# AVX-VNNI-INT8 and AVX10 (its arch/x86/include/asm/cpufeatures.h keeps them for guests of KVM): kernels do without the others, and AMX-FP16 is
# asked of CPUID. csrc/src/processor.cc has their bits there: a name that is added here is added there.
X86_FEATURES = {
    "adx": "adx",
    "amx-bf16": "amx_bf16",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx": "avx",
    "avx2": "avx2",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512f": "avx512f",
    "avx512fp16": "avx512_fp16",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vl": "avx512vl",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "gfni": "gfni",
    "lzcnt": "abm",
    "movbe": "movbe",
    "popcnt": "popcnt",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
}
# Likewise, of AArch64.
ARM_FEATURES = {"neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "bf16": "bf16", "i8mm": "i8mm"}
# Likewise, of RISC-V. V has registers of no fixed length, but of 128 bits at least: kernels have LLVM use so many.
RISCV_FEATURES = {letter: letter for letter in "acdfmv"}
# LLVM's names of the features of AArch64 whose vectors have no fixed length.
SCALABLE = frozenset(("sve", "sve2", "sme", "sme2"))
# All that kernels may depend on, as Linux names them.
FEATURES = frozenset((*X86_FEATURES.values(), *ARM_FEATURES.values(), *RISCV_FEATURES.values()))
# LLVM's name of an extension -> of the first processor with it, as which a processor is tuned that LLVM takes for one without.
FIRST_PROCESSOR = {"amx-tile": "sapphirerapids"}
_WITH_SSE4 = frozenset(("sse4_1", "sse4_2", "popcnt"))
_WITH_AVX2 = _WITH_SSE4 | {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
_WITH_AVX512 = _WITH_AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEON_FEATURES = frozenset(("asimd",))
_WITH_DOT_PRODUCTS = NEON_FEATURES | {"asimddp", "asimdhp"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Processors that run one machine code. `name`: as in `uname -m`. `triple`: for Linux. `features`: LLVM's name of each that kernels may
    use -> Linux's. `baseline`: those that every processor has, by Linux's names. `mcpu`: LLVM's name of a processor with no others. `options`:
    LLVM's, for kernels. `abi`: LLVM's name of how numbers are passed, where the triple leaves it open; else "".
    """

    name: str
    triple: str
    features: Mapping[str, str]
    baseline: frozenset[str]
    mcpu: str
    options: tuple[str, ...] = ()
    abi: str = ""


_X86_64 = Architecture("x86_64", "x86_64-linux-gnu", X86_FEATURES, frozenset(), "x86-64")
_AARCH64 = Architecture(
    "aarch64",
    "aarch64-linux-gnu",
    ARM_FEATURES,
    NEON_FEATURES,
    "generic",
    # LLVM moves loads of neighbours together, to make pairs of them: the second is there long before its use, and a sum goes to memory for it.
    ("-misched-cluster:bool=false",),
)
# Linux's distributions need RV64GC.
_RISCV64 = Architecture("riscv64", "riscv64-linux-gnu", RISCV_FEATURES, frozenset("acdfm"), "generic-rv64", abi="lp64d")
ARCHITECTURES = {each.name: each for each in (_X86_64, _AARCH64, _RISCV64)}
# Targets by name. x86-64: levels of its psABI. Arm: Technical Reference Manuals of Cortex-A72, Neoverse N1 (Armv8.2) and V1 (Armv8.4).
# RISC-V: its manual's letters.
TARGETS: Mapping[str, tuple[Architecture, frozenset[str]]] = {
    "x86-64-v2": (_X86_64, _WITH_SSE4),
    "x86-64-v3": (_X86_64, _WITH_AVX2),
    "x86-64-v4": (_X86_64, _WITH_AVX512),
    "armv8-a": (_AARCH64, NEON_FEATURES),
    "cortex-a72": (_AARCH64, NEON_FEATURES),
    "neoverse-n1": (_AARCH64, _WITH_DOT_PRODUCTS),
    "neoverse-v1": (_AARCH64, _WITH_DOT_PRODUCTS | {"bf16", "i8mm"}),
    "rv64gc": (_RISCV64, _RISCV64.baseline),
    "rv64gcv": (_RISCV64, _RISCV64.baseline | {"v"}),
}
# PyTorch's name of what it uses (`torch.backends.cpu.get_cpu_capability()`) -> features that are there at least.
FEATURES_OF_CAPABILITY = {"AVX2": _WITH_AVX2, "AVX512": _WITH_AVX512, "AVX512_VNNI": _WITH_AVX512}


@dataclass(frozen=True, slots=True)
class Isa:
    """Vectors, instructions and ways of computing that kernels may use on a processor.

    `lanes`: float32 values in a vector register. `registers`: vector registers. `dot_products`: instructions that sum products of 8 or 16 bits,
    as `dot_products.py` names them. `tiles`: dtypes that AMX multiplies. Each other field is a way of computing that needs more than
    arithmetic on vectors, or that was measured on some instruction sets only; where it is False, there is none.
    """

    lanes: int
    registers: int
    dot_products: frozenset[str] = frozenset()
    tiles: frozenset[str] = frozenset()
    # Weights of 8 and 4 bits are multiplied as they lie (`schedules/matmul/weight_only.py`); else they are dequantized before.
    multiplies_quantized: bool = False
    # Values of 4-bit integers are looked up in a table of float32 (`x86.looked_up`), or of bfloat16 (`x86.bf16_of_nibbles`).
    looks_up_float32: bool = False
    looks_up_bfloat16: bool = False
    # float32 is rounded to bfloat16 by an instruction (`x86.rounded_vector`).
    rounds_to_bfloat16: bool = False
    # Pixels at an image's border are loaded under a mask of bytes (`x86.dot_taps`).
    multiplies_taps: bool = False
    # Registers of a matrix product's tile for scalars that are loaded ahead; where an instruction reads them from memory there are none.
    loaded_ahead: int = 0
    # No product reads an operand from memory, but from a lane of a vector. So scalars are loaded a vector at a time, and input rows of a
    # depthwise convolution once for several output rows.
    loads_apart: bool = False
    # Constant (N, K) and (K, N) weights are read where they lie (`tile_sizes.py`): measured with 8 and 16 lanes.
    reads_unpacked: bool = False
    copies_panels: bool = False
    # No instruction converts float16: it is written as arithmetic on integers (`tir/storage.py`).
    computes_float16: bool = False


SSE = Isa(lanes=4, registers=16)
NEON = Isa(lanes=4, registers=32, loaded_ahead=4, loads_apart=True)
# One multiply-add takes a scalar beside a vector. Without V, four lanes are four of the 32 scalar registers.
RVV = Isa(lanes=4, registers=32, computes_float16=True)
RV64 = Isa(lanes=4, registers=8, computes_float16=True)
AVX2 = Isa(
    lanes=8,
    registers=16,
    dot_products=frozenset(("vpmaddubsw", "vpmaddwd")),
    multiplies_quantized=True,
    looks_up_float32=True,
    reads_unpacked=True,
    copies_panels=True,
)
AVX512 = replace(AVX2, lanes=16, registers=32)

# Those of AArch64.
ARM_DOT_PRODUCTS = frozenset(("sdot", "udot", "usdot", "bfdot", "smmla", "ummla", "usmmla", "bfmmla"))

_ANY = (SSE.lanes, AVX2.lanes, AVX512.lanes)
# A feature, the vectors that it is for (in lanes), and what it adds to an instruction set's fields.
_EXTENSIONS: tuple[tuple[str, tuple[int, ...], Mapping[str, Any]], ...] = (
    ("avx_vnni", (AVX2.lanes,), {"dot_products": {"vpdpbusd"}}),
    ("avx512_vnni", (AVX2.lanes, AVX512.lanes), {"dot_products": {"vpdpbusd"}}),
    ("avx512_vnni", (AVX512.lanes,), {"multiplies_taps": True}),
    ("avx512_bf16", (AVX512.lanes,), {"dot_products": {"vdpbf16ps"}}),
    # These have vectors of 16 lanes whatever else a kernel uses: beside tiles.
    ("avx512_bf16", _ANY, {"rounds_to_bfloat16": True}),
    ("avx512bw", _ANY, {"looks_up_bfloat16": True}),
    ("asimddp", (NEON.lanes,), {"dot_products": {"sdot", "udot"}}),
    ("i8mm", (NEON.lanes,), {"dot_products": {"usdot", "smmla", "ummla", "usmmla"}}),
    ("bf16", (NEON.lanes,), {"dot_products": {"bfdot", "bfmmla"}}),
)
# A feature -> the dtype that it multiplies on tiles; all need `_TILES`.
_TILES, _TILE_DTYPES = "amx_tile", {"amx_bf16": "bfloat16", "amx_fp16": "float16", "amx_int8": "int8"}


def widest_lanes(features: tuple[str, ...]) -> int:
    """float32 lanes of the widest vectors: 16 with AVX-512, 8 with AVX2, else 4 (SSE, NEON, RVV)."""
    if "avx512f" in features:
        return AVX512.lanes
    return AVX2.lanes if "avx2" in features else SSE.lanes


@functools.cache
def isa_of(features: tuple[str, ...], lanes: int) -> Isa:
    """The instruction set of a processor with `features`, as Linux names them, where kernels use vectors of `lanes` float32."""
    if NEON_FEATURES.issubset(features):
        isa = replace(NEON, lanes=lanes)
    elif _RISCV64.baseline.issubset(features):
        isa = RVV if "v" in features else RV64
    else:
        isa = {AVX512.lanes: AVX512, AVX2.lanes: AVX2}.get(lanes, SSE)
    for feature, widths, added in _EXTENSIONS:
        if feature in features and lanes in widths:
            changes = {
                name: isa.dot_products | more if name == "dot_products" else more for name, more in added.items()
            }
            isa = replace(isa, **changes)
    if _TILES in features:
        isa = replace(isa, tiles=frozenset(dtype for name, dtype in _TILE_DTYPES.items() if name in features))
    return isa
