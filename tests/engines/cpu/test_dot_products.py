"""The dot products of a processor."""

from __future__ import annotations

import dataclasses

import pytest

from torch_hybrid_backend.engines.cpu.dot_products import bf16_dot_product, integer_dot_product
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.sizes.size import Dim, symbol

AVX2 = Target("haswell", "x86", ("avx", "avx2", "fma"), 8, 2, 32 << 10, 1 << 20)
AVX_VNNI = dataclasses.replace(AVX2, features=(*AVX2.features, "avx_vnni"))
AVX512 = dataclasses.replace(AVX2, features=(*AVX2.features, "avx512f", "avx512bw"), lanes=16)
VNNI = dataclasses.replace(AVX512, features=(*AVX512.features, "avx512_vnni"))
BF16 = dataclasses.replace(VNNI, features=(*VNNI.features, "avx512_bf16"))
SSE = dataclasses.replace(AVX2, features=(), lanes=4)


@pytest.mark.parametrize(
    ("target", "left", "right", "knows", "instruction"),
    [
        (VNNI, "uint8", "int8", False, "vpdpbusd"),
        (VNNI, "int8", "int8", True, "vpdpbusd"),
        (VNNI, "int8", "int8", False, "vpmaddwd"),  # what moves it could not be made up for
        (VNNI, "uint8", "uint8", True, "vpmaddwd"),
        (AVX_VNNI, "int8", "int8", True, "vpdpbusd"),
        (AVX512, "int8", "int8", True, "vpmaddwd"),
        (AVX2, "uint8", "int8", True, "vpmaddwd"),
        (SSE, "uint8", "int8", True, None),
    ],
)
def test_integer_dot_products(target: Target, left: str, right: str, knows: bool, instruction: str | None) -> None:
    """VNNI where the processor has it and the operands suit it, products of 16 bits elsewhere; signed operands are moved for VNNI alone."""
    dot = integer_dot_product(left, right, target, knows_sums=knows)
    assert (dot and dot.instruction) == instruction
    if dot is not None:
        assert dot.shift == (128 if dot.instruction == "vpdpbusd" and left == "int8" else 0)


@pytest.mark.parametrize(
    ("name", "left", "right", "knows", "expected"),
    [
        ("neoverse-n1", "int8", "int8", False, ("sdot", "int8", 0)),
        ("neoverse-n1", "uint8", "int8", True, ("sdot", "int8", -128)),
        ("neoverse-n1", "uint8", "int8", False, None),
        ("neoverse-n1", "uint8", "uint8", False, ("udot", "uint8", 0)),
        ("neoverse-n1", "int8", "uint8", True, ("udot", "uint8", 128)),
        ("neoverse-v1", "uint8", "int8", False, ("usdot", "uint8", 0)),
        ("neoverse-v1", "int8", "int8", False, ("sdot", "int8", 0)),
        ("armv8-a", "int8", "int8", True, None),
    ],
)
def test_integer_dot_products_of_arm(
    name: str, left: str, right: str, knows: bool, expected: tuple[str, str, int] | None
) -> None:
    """Operands of one kind stay as they are; a left one of the other kind is moved, where the sums of weights are known."""
    dot = integer_dot_product(left, right, Target.named(name), knows_sums=knows)
    assert (dot and (dot.instruction, dot.left, dot.shift)) == expected


@pytest.mark.parametrize(
    ("name", "left", "right", "knows", "rows", "expected"),
    [
        ("neoverse-v1", "int8", "int8", False, 2, ("smmla", "int8", 0)),
        ("neoverse-v1", "uint8", "uint8", False, symbol("m"), ("ummla", "uint8", 0)),
        ("neoverse-v1", "uint8", "int8", False, 5, ("usmmla", "uint8", 0)),
        ("neoverse-v1", "int8", "uint8", True, 5, ("ummla", "uint8", 128)),
        ("neoverse-v1", "int8", "uint8", False, 5, None),
        ("neoverse-v1", "int8", "int8", False, 1, ("sdot", "int8", 0)),
        ("neoverse-n1", "int8", "int8", False, 5, ("sdot", "int8", 0)),
    ],
)
def test_products_of_pairs_of_rows(
    name: str, left: str, right: str, knows: bool, rows: Dim, expected: tuple[str, str, int] | None
) -> None:
    """FEAT_I8MM multiplies two rows by two columns; a single row is left to dot products."""
    dot = integer_dot_product(left, right, Target.named(name), knows_sums=knows, rows=rows)
    assert (dot and (dot.instruction, dot.left, dot.shift)) == expected
    assert dot is None or (dot.rows, dot.group) == ((2, 8) if "mmla" in dot.instruction else (1, 4))


@pytest.mark.parametrize(
    ("name", "rows", "depth", "instruction"),
    [
        ("neoverse-v1", 2, 8, "bfmmla"),
        ("neoverse-v1", 1, 8, "bfdot"),
        ("neoverse-v1", 2, 6, "bfdot"),
        ("neoverse-n1", 2, 8, None),
    ],
)
def test_products_of_bfloat16_of_arm(name: str, rows: int, depth: int, instruction: str | None) -> None:
    """Pairs of rows where depths are whole words of four."""
    dot = bf16_dot_product(Target.named(name), rows, depth)
    assert (dot and dot.instruction) == instruction


@pytest.mark.parametrize(
    ("target", "left", "knows", "bounds", "instruction"),
    [
        (AVX2, "uint8", False, (-64, 64), "vpmaddubsw"),
        (AVX2, "int8", True, (-64, 63), "vpmaddubsw"),
        (AVX512, "uint8", True, (-8, 7), "vpmaddubsw"),
        (AVX2, "int8", False, (-64, 64), "vpmaddwd"),
        (AVX2, "uint8", True, (-65, 64), "vpmaddwd"),
        (AVX2, "uint8", True, (-64, 65), "vpmaddwd"),
        (AVX_VNNI, "uint8", True, (-64, 64), "vpdpbusd"),
        (VNNI, "int8", True, (-64, 64), "vpdpbusd"),
    ],
)
def test_products_of_weights_of_7_bits(
    target: Target, left: str, knows: bool, bounds: tuple[int, int], instruction: str
) -> None:
    """Two of them by bytes fit into 16 bits, so they are multiplied as bytes without VNNI too."""
    dot = integer_dot_product(left, "int8", target, knows_sums=knows, bounds=bounds)
    assert dot is not None
    assert dot.instruction == instruction
    assert dot.shift == (128 if dot.group == 4 and left == "int8" else 0)


def test_bfloat16_has_dot_products_with_avx512_bf16_alone() -> None:
    """Elsewhere it is widened."""
    assert bf16_dot_product(BF16) is not None
    assert bf16_dot_product(VNNI) is None
