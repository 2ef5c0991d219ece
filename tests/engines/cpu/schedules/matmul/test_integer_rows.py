"""Sums of integers in place of products of float32 with weights of 8 and 4 bits."""

from __future__ import annotations

import dataclasses
import platform
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel
from tests.engines.cpu.schedules.matmul.test_weight_only import check, kernel_of, packed_weight
from torch_hybrid_backend.engines.cpu.dot_products import row_dot_product, row_group
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only
from torch_hybrid_backend.engines.cpu.target import Target

VNNI = Target("znver4", "test", ("avx2", "avx512_vnni", "avx512f", "fma"), 16, 2, 32 << 10, 1 << 20)
VEX = Target("alderlake", "test", ("avx2", "avx_vnni", "fma"), 8, 2, 32 << 10, 1 << 20)


def test_what_is_taken() -> None:
    """Groups of whole vectors, as many rows as sums have registers, where there is vpdpbusd. A row's groups are up to 256, in a weight's."""
    for target in (VNNI, VEX):
        assert row_dot_product(32, 1, 2, 3, target) is not None
    assert row_dot_product(256, 3, 2, 3, VNNI) is not None
    assert row_dot_product(32, 4, 2, 3, VNNI) is None
    assert row_dot_product(32, 6, 2, 1, VNNI) is not None
    assert row_dot_product(32, 7, 2, 1, VNNI) is None
    assert row_dot_product(32, 2, 2, 3, VEX) is None
    assert row_dot_product(32, 2, 2, 1, VEX) is not None
    assert row_dot_product(40, 1, 2, 3, VNNI) is None
    assert row_dot_product(8, 1, 2, 3, VNNI) is None
    assert row_dot_product(32, 1, 2, 3, dataclasses.replace(VNNI, features=("avx2", "avx512f", "fma"))) is None
    assert [row_group(size, 1, VNNI) for size in (32, 256, 5632, 272)] == [32, 64, 64, 16]
    assert [row_group(size, 3, VNNI) for size in (32, 256, 768, 5632, 11008, 272, 40)] == [
        32,
        256,
        256,
        256,
        256,
        16,
        None,
    ]
    assert row_group(40, 3, VEX) == 40


def test_largest_numbers_do_not_wrap() -> None:
    """The largest of a group fits into its bytes, whatever it is: 400 groups of random numbers, and groups of up to 256."""
    check(kernel_of(3, 4096, 32, HOST, 4, 32), HOST)
    check(kernel_of(1, 1024, 37, HOST, 4, 256, zeros=True), HOST)
    check(kernel_of(3, 4096, 32, HOST, 8, 32, in_words=True), HOST)
    check(kernel_of(1, 5632, 37, HOST, 8, zeros=True, in_words=True), HOST)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_of_any_size(bits: int) -> None:
    """Groups of other magnitudes, zeros, and numbers that no bytes hold give what they give in float32."""
    k, n, tile = 128, 48, 2 * HOST.lanes
    kernel = kernel_of(1, k, n, HOST, bits, 32, in_words=True)
    function = compile_kernel(kernel, weight_only.emit)["kernel"]
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(1, 8, (1, k, n), generator=generator) * torch.tensor([1, -1]).repeat(n // 2)
    memory = [packed_weight(q, kernel.weight).flatten(), pack_b(torch.full((1, k // 32, n), 0.125), tile).flatten()]

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(n)
        function(x, *memory, torch.zeros(n), torch.ones(n), out)
        return out

    w = q[0].double() * 0.125
    sizes = torch.tensor([1e-12, 1e3, 0.0, 1e15]).repeat_interleave(32)
    x = torch.randn(k, generator=generator) * sizes
    for part in (x, *(x * (sizes == size) for size in sizes.unique())):
        want = torch.relu(part.double() @ w)
        room = part.double().abs() @ w.abs() * 1e-6
        assert ((product(part).double() - want).abs() <= room).all()
    # Above 1e36 sums may be infinite too early: those of bytes, and those of nibbles where they are made in float32.
    large = -3e38 if bits == 4 and row_dot_product(32, 1, 2, 3, HOST) is not None else -3e37
    for special in (torch.inf, -torch.inf, torch.nan, 1e36, large, 1e-38, 1e-44):
        x = torch.randn(k, generator=generator)
        x[33] = special
        if 0 < abs(special) < 1e-30:
            x[32:64] = torch.where(torch.arange(32) == 1, special, 0.0)
        torch.testing.assert_close(product(x), torch.relu(x @ w.float()), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="looks for x86's instructions")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("target", "register"), [(VNNI, "zmm"), (VEX, "ymm")], ids=["avx512", "vex"])
def test_machine_code(target: Target, register: str, bits: int) -> None:
    """For each row a word of 8 weights takes two masks, a shift and 6 dot products, one of 4 weights 3; sums stay in registers."""
    scaled_by = "bfloat16" if bits == 4 else "float32"
    kernel = kernel_of(1, 512, 128, target, bits, 32, in_words=True, scaled_by=scaled_by)
    assembly = compile_kernel(kernel, weight_only.emit, target).inspect_source("asm")
    products = [m.start() for m in re.finditer(rf"vpdpbusd\s+.*%{register}\d+$", assembly, flags=re.MULTILINE)]
    assert products
    assert len(products) % (48 // bits) == 0
    inner = assembly[products[0] : products[-1]]
    assert len(re.findall(r"vpsrl[dw]\s", inner)) <= (len(products) // 6 if bits == 4 else 0)
    assert not re.search(rf"vmov\w+\s+(?:-?\d*\(%rsp\), %{register}|%{register}\d+, -?\d*\(%rsp\))", inner)
    assert "prefetch" in assembly
