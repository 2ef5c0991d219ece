"""PyTorch's products of weights packed in 4 bits become products of dequantized weights, by the way in which this processor packs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.passes.values import verify_values
from torch_hybrid_backend.passes.cpu.unpack_int4 import unpack_int4
from torch_hybrid_backend.passes.verify import verify

_PRODUCT = "_weight_int4pack_mm_for_cpu.default"


class Packed(nn.Module):
    """A linear layer as torchao packs it; `exact` is its product in float64."""

    def __init__(self, n: int, k: int, group: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        q = torch.randint(0, 16, (n, k), dtype=torch.int32)
        scale, zero = (torch.randn(k // group, n) / 8 for _ in range(2))
        self.group = group
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2))
        self.register_buffer("moves", torch.stack([scale, zero], 2).to(dtype))
        scale, zero = (part.double().repeat_interleave(group, 0) for part in self.moves.unbind(2))
        self.weight = (q.t().double() - 8) * scale + zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.moves)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() @ self.weight


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dynamic", [False, True])
def test_products(captured: Callable, group: int, dynamic: bool) -> None:
    """Scales and zeros of any size of groups, for any number of rows."""
    layer = Packed(192, 256, group)
    x = torch.randn(5, 256)
    subject = captured(layer, x, dynamic=dynamic)
    assert unpack_int4(subject.gm, subject.ctx)
    verify(subject.gm, subject.contract)
    verify_values(subject.gm)
    (got,) = subject.run()
    torch.testing.assert_close(got.double(), layer.exact(x), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got, layer(x), rtol=1e-4, atol=1e-3)
    assert subject.operators()["mm.default"] == 2


def test_what_stays(captured: Callable) -> None:
    """Columns that are no whole blocks, and weights that are no constants."""
    odd, layer = Packed(80, 64, 32), Packed(64, 64, 32)
    subject = captured(odd, torch.randn(3, 64))
    assert not unpack_int4(subject.gm, subject.ctx)

    def given(x: torch.Tensor, packed: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, moves)

    subject = captured(given, torch.randn(3, 64), layer.packed, layer.moves)
    assert not unpack_int4(subject.gm, subject.ctx)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
@torch.no_grad()
def test_compiled(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours unpacks the weight."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")  # whatever a busy machine would measure
    layer = Packed(128, 256, 64, dtype)
    compiled = torch.compile(layer, backend="hybrid", dynamic=False, options={"strict": True})
    for _ in range(2):
        x = torch.randn(1, 256).to(dtype)
        got, want = compiled(x), layer.exact(x)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert "dequantized_matmul" in str(torch_hybrid_backend.explain(layer, x))


@pytest.mark.full
@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_other_processors(capability: str) -> None:
    """The way of each processor that PyTorch can be held to is found."""
    code = "from torch_hybrid_backend.passes.cpu.unpack_int4 import _form; print(_form())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    capabilities = {"avx512": {"(64, False)", "(32, False)", "(32, True)"}, "avx2": {"(32, False)", "(32, True)"}}
    assert done.stdout.strip() in capabilities.get(capability, {"(32, True)"})
