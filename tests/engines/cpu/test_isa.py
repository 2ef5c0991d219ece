"""Instruction sets by features: vectors, registers, products, and ways of computing that they have or lack."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from torch_hybrid_backend.engines.cpu.isa import AVX2, AVX512, NEON, RV64, RVV, SSE, X86_FEATURES, isa_of, widest_lanes

_AVX512F = ("avx2", "avx512f")


@pytest.mark.parametrize(("features", "lanes"), [(("avx512f", "avx2"), 16), (("avx2",), 8), (("sse4_2",), 4), ((), 4)])
def test_lanes(features: tuple[str, ...], lanes: int) -> None:
    """The widest extension decides the vector length."""
    assert widest_lanes(features) == lanes


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        ((), SSE),
        (("avx2", "fma"), AVX2),
        (_AVX512F, AVX512),
        (("asimd", "asimdhp"), NEON),
        (tuple("acdfmv"), RVV),
        (tuple("acdfm"), RV64),
    ],
)
def test_instruction_sets_without_extensions(features: tuple[str, ...], isa: object) -> None:
    """The vectors decide, but for those of Arm and RISC-V, which are as wide as SSE's."""
    assert isa_of(features, widest_lanes(features)) == isa


def test_cpuid_is_asked_for_every_extension() -> None:
    """Features that files can demand of a processor are those that the C++ side confirms by CPUID."""
    source = Path(__file__).parents[3] / "csrc/src/processor.cc"
    confirmed = re.findall(r'^    \{"(\w+)", ', source.read_text(), re.MULTILINE)
    assert sorted(confirmed) == sorted(X86_FEATURES.values())


def test_registers() -> None:
    """AArch64 has 32 vector registers of four lanes, x86 half as many before AVX-512."""
    assert {isa.registers for isa in (SSE, AVX2)} == {16}
    assert (NEON.lanes, NEON.registers) == (4, 32)
    assert AVX512.registers == 32


@pytest.mark.parametrize(
    ("features", "lanes", "added"),
    [
        (("avx2", "avx_vnni"), 8, {"vpdpbusd"}),
        ((*_AVX512F, "avx_vnni"), 16, set()),  # its vectors have eight lanes
        ((*_AVX512F, "avx512_vnni"), 16, {"vpdpbusd"}),
        ((*_AVX512F, "avx512_vnni"), 8, {"vpdpbusd"}),
        ((*_AVX512F, "avx512_bf16"), 16, {"vdpbf16ps"}),
        ((*_AVX512F, "avx512_bf16"), 8, set()),
    ],
)
def test_dot_products(features: tuple[str, ...], lanes: int, added: set[str]) -> None:
    """Extensions add instructions to those of all processors with AVX2, for the vectors that the extensions are for."""
    assert isa_of(features, lanes).dot_products == {"vpmaddubsw", "vpmaddwd"} | added


@pytest.mark.parametrize(
    ("features", "has"),
    [
        ((), set()),
        (("asimddp",), {"sdot", "udot"}),
        (("asimddp", "i8mm"), {"sdot", "udot", "usdot", "smmla", "ummla", "usmmla"}),
        (("bf16",), {"bfdot", "bfmmla"}),
    ],
)
def test_dot_products_of_arm(features: tuple[str, ...], has: set[str]) -> None:
    """FEAT_DotProd multiplies bytes with signs, or without; FEAT_I8MM both in one; FEAT_BF16 bfloat16."""
    assert isa_of(("asimd", *features), 4).dot_products == has


def test_tiles() -> None:
    """The dtypes that AMX multiplies; none without its tile registers."""
    tiles = (*_AVX512F, "amx_bf16", "amx_int8")
    assert isa_of((*tiles, "amx_tile"), 16).tiles == {"bfloat16", "int8"}
    assert isa_of(tiles, 16).tiles == set()


@pytest.mark.parametrize("isa", [SSE, NEON, RVV, RV64])
def test_vectors_of_four_lanes_refuse_by_name(isa: object) -> None:
    """Every way of computing beyond arithmetic on vectors has a property, and is refused; two tell of the vectors' arithmetic itself."""
    assert {
        value
        for field in dataclasses.fields(isa)[2:]
        if field.name not in ("loaded_ahead", "loads_apart", "computes_float16") and (value := getattr(isa, field.name))
    } == set()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("feature", "lanes", "ways"),
    [
        ("avx512_bf16", 16, {"rounds_to_bfloat16"}),
        ("avx512bw", 8, {"looks_up_bfloat16"}),
        ("avx512_vnni", 16, {"multiplies_taps"}),
        ("avx512_vnni", 8, set()),
    ],
)
def test_ways_that_extensions_add(feature: str, lanes: int, ways: set[str]) -> None:
    """Beside tiles vectors have 16 lanes, whatever else a kernel uses; taps are multiplied by such vectors alone."""
    before, after = isa_of(_AVX512F, lanes), isa_of((*_AVX512F, feature), lanes)
    names = {field.name for field in dataclasses.fields(after)} - {"dot_products"}
    assert {name for name in names if getattr(before, name) != getattr(after, name)} == ways
