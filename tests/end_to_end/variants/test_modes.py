"""Modes around and inside compiled functions: gradients on and off, inference mode, autocast, default dtype, deterministic algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import nn

from tests.end_to_end.variants.harness import assert_same_tensor, check, compiled, forced


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 5))


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize(
    "order",
    [list(MODES), list(reversed(MODES)), ["inference_mode", "enable_grad", "inference_mode", "autocast", "no_grad"]],
)
def test_one_model_in_every_mode(order: list[str]) -> None:
    """A compiled model that is called in one mode after another gives what eager gives in each, inference tensors and gradients included."""
    model = _model()
    fast = compiled(model)
    x = _numbers(7, 12)
    with forced():
        for name in order:
            for _ in range(2):
                with MODES[name]():
                    got, want = fast.call(x), model(x)
                assert got.is_inference() == want.is_inference()
                if name == "autocast":  # kernels keep more digits between steps than eager does
                    assert got.dtype == want.dtype == torch.bfloat16
                    assert got.requires_grad == want.requires_grad
                    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
                else:
                    assert_same_tensor(got, want)
    assert fast.taken


def test_inference_tensors_as_inputs() -> None:
    """Tensors made in inference mode are taken outside it, too, and count no versions."""
    with torch.inference_mode():
        x = _numbers(7, 12)
    model = _model().requires_grad_(False)
    fast = compiled(model)
    with forced(), torch.no_grad():
        for _ in range(3):
            assert_same_tensor(fast.call(x), model(x))
    assert fast.taken


def test_weights_made_in_inference_mode() -> None:
    """A model built in inference mode: its weights count no versions, yet a write to them is seen."""
    with torch.inference_mode():
        model = _model()
        fast = compiled(model)
        x = _numbers(7, 12)
        with forced():
            for _ in range(2):
                assert_same_tensor(fast.call(x), model(x))
            for parameter in model.parameters():
                parameter.mul_(2)
            assert_same_tensor(fast.call(x), model(x))
    assert fast.taken


def test_autocast_inside() -> None:
    """An autocast region in the function, with a part of it in which it is off."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = x @ w
            s = torch.softmax(y, -1)
        return y, z, s, x @ w

    def make() -> tuple[torch.Tensor, ...]:
        return _numbers(8, 16), _numbers(16, 10)

    want = function(*make())
    fast = compiled(function)
    with forced():
        for _ in range(3):
            got = fast.call(*make())
            assert [t.dtype for t in got] == [t.dtype for t in want]
            for a, b in zip(got, want, strict=True):
                tolerance = 2e-2 if b.dtype is torch.bfloat16 or b is want[2] else 1e-5
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert fast.taken


def test_no_grad_inside() -> None:
    """Parts of the function without gradients: detached paths, set_grad_enabled, inference inside a differentiated function."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x @ w)
        with torch.no_grad():
            scale = y.abs().mean() + 1
        torch.set_grad_enabled(False)
        mask = y > 0.1
        torch.set_grad_enabled(True)
        return y / scale, (y.detach() * w.sum()).sin(), scale, mask

    check(function, lambda: (_numbers(6, 8).requires_grad_(), _numbers(8, 4).requires_grad_()), backward=True)


MIXES = [(True, True, True), (True, False, False), (False, True, False), (False, False, True), (False, False, False)]


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_of_requires_grad(mix: tuple[bool, ...]) -> None:
    """Whichever of the inputs require gradients: results require them as in eager, and they are eager's."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x @ w)
        return y + b, y.sum(0), b.exp(), (x > 0).sum(), w.detach() * 2

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(
            t.requires_grad_(r) for t, r in zip((_numbers(6, 8), _numbers(8, 5), _numbers(5)), mix, strict=True)
        )

    check(function, make, backward=True)


def test_mixes_in_turn() -> None:
    """A compiled function is called with and without gradients in turn."""
    makers = [
        (lambda k=k: (_numbers(6, 8).requires_grad_(k % 2 == 1), _numbers(8, 5).requires_grad_(k > 1)))
        for k in range(4)
    ]
    check(lambda x, w: torch.sigmoid(x @ w) * 2, *makers, times=2, backward=True)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "deterministic algorithms": _deterministic,
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_torch(name: str) -> None:
    """Global settings of torch that change what operators give."""

    def function(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return n / 3, torch.ones(4) * x[:4, 0], torch.arange(0, 1, 0.25), x.sum(0), torch.full((2,), 1.5) + n[:2]

    with SETTINGS[name]():
        check(function, lambda: (torch.arange(6), torch.ones(6, 8, dtype=torch.float32)))


def test_another_default_dtype_later() -> None:
    """The default dtype changes between two calls of one compiled function."""

    def function(n: torch.Tensor) -> torch.Tensor:
        return n / 3 + torch.ones(6)

    fast = compiled(function)
    with forced():
        for dtype in (torch.float32, torch.float64, torch.float32):
            with _default_dtype(dtype):
                assert_same_tensor(fast.call(torch.arange(6)), function(torch.arange(6)))
