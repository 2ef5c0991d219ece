"""Operators that eager refuses for the dtypes of what they are given are found before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from torch_hybrid_backend.driver.refused_forms import refused_operator


def _refused(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> str | None:
    """The answer of `refused_operator` about the function's graph."""
    found: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(refused_operator(gm))
        return gm.forward

    torch.compiler.reset()
    try:
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    except (RuntimeError, NotImplementedError):
        assert found  # eager's
    return found[0]


F32, F64, I64 = torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64), torch.randint(1, 3, (4, 4))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: a @ b, (F32, I64)),
        (lambda a, b: torch.mm(a, b) + 1, (F32.half(), F32)),
        (lambda a, b: a.matmul(b), (F32, I64)),
        (lambda a, w: functional.layer_norm(a, (4,), w), (F32, F64[0])),
        (lambda a, t: functional.cross_entropy(a, t) + 1, (F32, I64[0].int())),
        (lambda a: a.var(1), (I64,)),
        (lambda a: functional.relu(a) + 1, (I64 > 1,)),
        (lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b), (F32, F64)),
    ],
)
def test_a_mistake_is_found(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """With the user's line and eager's error."""
    with pytest.raises(RuntimeError) as expected:
        function(*inputs)
    found = _refused(function, *inputs)
    assert found is not None
    assert "test_refused_forms.py" in found
    assert str(expected.value).split(",")[0].split("(")[0][:20] in found


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: a @ a + b, (F32, I64)),
        (lambda a, b: a[b] + functional.embedding(b, a).sum(-1, keepdim=True), (F32, I64)),
        (lambda a, b: torch.where(b > 1, a, 0).masked_fill(b == 2, 1.0).to(torch.float64) @ F64, (F32, I64)),
        (lambda a, b: a.gather(1, b).index_add(0, b[0], a), (F32, I64)),
        (lambda a, b: torch.multinomial(a.abs() + 1, 2) + b[:, :2], (F32, I64)),  # zeros alone it refuses
        (lambda a, b: torch.cholesky_inverse(a.double()) + b, (F32, I64)),
        (
            lambda a, b: functional.interpolate(b[None, None], scale_factor=2),
            (F32, I64),
        ),  # there is no kernel: an engine may have one
        (lambda a, b: b.view(2, 8) % b.numel(), (F32, I64)),
    ],
)
def test_what_eager_takes_passes(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """Also where it takes some values only, or where it has no kernel; no random number is drawn."""
    before = torch.get_rng_state()
    torch.manual_seed(3)
    assert _refused(function, *inputs) is None
    torch.set_rng_state(before)


def test_no_random_numbers_are_drawn() -> None:
    """The caller's generator stays where it is."""
    found = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        before = torch.get_rng_state()
        assert refused_operator(gm) is None
        found.append(torch.equal(torch.get_rng_state(), before))
        return gm.forward

    torch.compile(lambda x: torch.multinomial(x.abs() + 1, 2), backend=backend)(F32)
    assert found == [True]


def test_under_autocast_nothing_is_refused() -> None:
    """Autocast casts what does not go together, also where the user's code enters it."""
    linear = torch.nn.Linear(4, 4)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(linear(x))

    with torch.no_grad():
        assert _refused(inside, F32) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert _refused(lambda x: linear(linear(x)), F32) is None


def test_sizes_known_only_at_run_time_are_left_out() -> None:
    """Operators that take such sizes are not tried; the rest is."""
    assert _refused(lambda a, b: (a @ F32) + b, F32, I64, dynamic=True) is None
