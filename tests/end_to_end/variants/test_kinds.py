"""Tensors that no kernel takes: complex numbers, sparse and quantized tensors, float8; eager runs them, among regions that the engine runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.end_to_end.variants.harness import assert_same_tensor, check, compiled, forced


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is beta
        yield


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _of(value: torch.Tensor, results: Callable[[torch.Tensor], object]) -> object:
    return results(value)


COMPLEX: dict[str, Callable[[torch.Tensor], object]] = {
    "made inside": lambda x: (torch.complex(x * 2, x.sin()) * 1j).abs() + 1,
    "returned": lambda x: (torch.relu(x) * 2).to(torch.complex64) + 1j,
    "FFT": lambda x: torch.fft.irfft(torch.fft.rfft(x.tanh()) * 2) + 1,
    "conjugate": lambda x: _of(torch.complex(x.relu(), x), lambda z: (z.conj() @ z.mT, z.conj())),
    "parts": lambda x: _of(torch.polar(x.abs() + 1, x), lambda z: (z.real.sin() + z.imag, z.angle())),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x.exp(), x)) * 2,
    "view_as_complex": lambda x: torch.view_as_complex((x * 2).view(5, 3, 2)) + 1,
    "eigenvalues": lambda x: torch.linalg.eigvals(x[:5, :5].sigmoid()).abs().sort()[0] * 2,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex(name: str) -> None:
    """Complex numbers between real operators."""
    check(COMPLEX[name], lambda: (_numbers(5, 6),))


def test_complex_arguments() -> None:
    """Complex arguments, conjugated views of them, and a write to one."""

    def function(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z.mul_(2)
        return z + x, z.real * 2, torch.relu(x) + 1

    def make(conjugated: bool) -> tuple[torch.Tensor, ...]:
        z = torch.complex(_numbers(5, 6), _numbers(5, 6) + 1)
        return (z.conj() if conjugated else z), _numbers(5, 6)

    check(function, lambda: make(False))
    check(lambda z, x: (z.conj() * x, torch.tanh(x) * 2), lambda: make(True), lambda: make(False))


def _sparse(layout: torch.layout) -> torch.Tensor:
    dense = _numbers(6, 8).relu()
    return dense.to_sparse(layout=layout)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["COO", "CSR"])
def test_sparse(layout: torch.layout) -> None:
    """Sparse arguments, products with them, and sparse results, with dense operators before and after."""

    def function(s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(s @ torch.tanh(x)) * 2

    fast = compiled(function)
    with forced():
        for k in range(3):
            assert_same_tensor(
                fast.call(_sparse(layout), _numbers(8, 4) + k), function(_sparse(layout), _numbers(8, 4) + k)
            )


def test_made_sparse_inside() -> None:
    """A dense tensor made sparse and dense again."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = torch.relu(x).to_sparse()
        return s.to_dense() * 2, x.sin()

    fast = compiled(function)
    with forced():
        for _ in range(3):
            for got, want in zip(fast.call(_numbers(5, 6)), function(_numbers(5, 6)), strict=True):  # type: ignore[arg-type]
                assert_same_tensor(got, want)


def test_quantized() -> None:
    """Quantized tensors made, used and dequantized between float operators."""

    def function(x: torch.Tensor) -> torch.Tensor:
        q = torch.quantize_per_tensor(torch.tanh(x), 0.05, 3, torch.qint8)
        return q.dequantize() * 2 + 1

    fast = compiled(function)
    with forced():
        for k in range(3):
            assert_same_tensor(fast.call(_numbers(5, 6) * (k + 1)), function(_numbers(5, 6) * (k + 1)))


def test_quantized_model() -> None:
    """A dynamically quantized model gives what it gives in eager."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    fast = compiled(quantized, strict=False)
    with forced(), torch.no_grad():
        for k in range(3):
            torch.testing.assert_close(
                fast.call(_numbers(5, 8) + k), quantized(_numbers(5, 8) + k), rtol=1e-3, atol=1e-3
            )


def test_fake_quantization() -> None:
    """Fake quantization, as quantization-aware training has it: integers steps of floats."""
    check(
        lambda x: torch.fake_quantize_per_tensor_affine(x.sin(), 0.1, 0, -128, 127) * 2,
        lambda: (_numbers(5, 6).requires_grad_(),),
        backward=True,
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(dtype: torch.dtype) -> None:
    """Casts to float8 and back between float operators."""
    check(lambda x: (x * 2).to(dtype).to(torch.float32) + 1, lambda: (_numbers(5, 6),))


def test_other_tensors_pass_through() -> None:
    """Unsigned integers of 16 bits and more, and tensors of strings' bytes, as arguments and results."""

    def function(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a, b.to(torch.int64) + 1, torch.relu(x) * 2, a.view(torch.int16)

    def make() -> tuple[torch.Tensor, ...]:
        return (
            torch.arange(6).to(torch.uint16),
            torch.frombuffer(bytearray(b"some text"), dtype=torch.uint8),
            _numbers(5, 6),
        )

    check(function, make)
