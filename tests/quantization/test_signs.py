"""`Signs`: which values cannot be negative, in eager and in what Dynamo traces; what is written to is not believed any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.quantization.call_sites import CallSites, LayerCall
from torch_hybrid_backend.quantization.signs import Signs

Make = Callable[[torch.Tensor], torch.Tensor]


def _write(x: torch.Tensor) -> torch.Tensor:
    x[:, :, 0].sub_(3.0)
    return x


def _join(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.relu(x), functional.max_pool2d(torch.sigmoid(x), 3, 1, 1)], dim=1)[:, ::2]


def _many(x: torch.Tensor) -> torch.Tensor:
    first = torch.relu(x)
    for _ in range(100):
        torch.relu(x)
    return first


NEVER: dict[str, Make] = {
    "relu": torch.relu,
    "method": lambda x: x.relu(),
    "module": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(0.0, 1.0),
    "clamp": lambda x: x.clamp(min=0),
    "sigmoid": lambda x: functional.dropout(torch.sigmoid(x), training=False),
    "softmax": nn.Softmax(1),
    "pooled": lambda x: functional.avg_pool2d(functional.max_pool2d(functional.relu(x), 3, 1, 1), 3, 1, 1),
    "viewed": lambda x: torch.relu(x).flatten(2).view(x.shape).contiguous(),
    "gated": lambda x: torch.relu(x) * torch.sigmoid(x),
    "added": lambda x: torch.relu(x) + x.abs() + 1,
    "added in place": lambda x: torch.relu(x).add_(x.abs()),
    "joined": _join,
    "read long after": lambda x: functional.max_pool2d(torch.relu(x), 1) if torch.sigmoid(x).sum() > 0 else x,
}
MAYBE: dict[str, Make] = {
    "input": lambda x: x,
    "convolution": lambda x: functional.conv2d(torch.relu(x), torch.ones(4, 4, 1, 1)),
    "shifted": lambda x: torch.relu(x) - 1,
    "less": lambda x: torch.relu(x) + -1,
    "of one": lambda x: torch.relu(x) + x,
    "with alpha": lambda x: torch.add(torch.relu(x), torch.relu(x), alpha=-2),
    "hardtanh": nn.Hardtanh(-1.0, 1.0),
    "clamp": lambda x: torch.relu(x).clamp(-2.0, -1.0),
    "silu": functional.silu,
    "joined": lambda x: torch.cat([torch.relu(x), x], 1)[:, ::2],
    "written": lambda x: _write(torch.relu(x)),
    "written through a view": lambda x: [y := torch.relu(x), y.view(-1).sub_(1)][0],
    "written by an index": lambda x: [y := torch.relu(x), y.__setitem__(0, -1.0)][0],
    "written by out": lambda x: [y := torch.relu(x), torch.sub(y, 1, out=y)][0],
    "written as data": lambda x: [y := torch.relu(x), setattr(y, "data", x)][0],
    "subtracted": lambda x: [y := torch.relu(x), y.__isub__(1)][0],
    "bits": lambda x: torch.relu(x).view(torch.int32).neg().view(torch.float32),
    "bfloat16s of a float": lambda x: torch.relu(x).view(torch.bfloat16)[..., ::2].contiguous(),
    "integers": lambda x: (torch.relu(x) * 300).to(torch.int8).square().float(),
    "too long ago": _many,
}


def _told(make: Make, x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Whether the convolution of what `make` gives is told that this is never negative, and what it is."""
    found: list[bool] = []
    values: list[torch.Tensor] = []

    def visit(call: LayerCall) -> torch.Tensor:
        found.append(call.never_negative)
        values.append(call.operands[0])
        return call.compute(*call.operands)

    with torch.no_grad(), CallSites(visit, signs=True):
        y = make(x)
        functional.conv2d(y, torch.ones(2, 4, 1, 1, dtype=y.dtype))
    return found[-1], values[-1]


@pytest.mark.parametrize("case", NEVER)
def test_known(case: str) -> None:
    told, y = _told(NEVER[case], torch.randn(2, 4, 5, 6))
    assert told
    assert bool((y >= 0).all())


@pytest.mark.parametrize("case", MAYBE)
def test_not_known(case: str) -> None:
    told, _ = _told(MAYBE[case], torch.randn(2, 4, 5, 6))
    assert not told


@pytest.mark.parametrize(
    ("case", "make"), [*NEVER.items(), *MAYBE.items()], ids=[*NEVER, *(f"not {case}" for case in MAYBE)]
)
def test_dynamo_sees_the_same(case: str, make: Make) -> None:
    """In one graph, or where the graph breaks: what eager is told."""
    x = torch.randn(2, 4, 5, 6)

    def doubled(value: torch.Tensor) -> torch.Tensor:
        def visit(call: LayerCall) -> torch.Tensor:
            return call.compute(call.operands[0] * (2.0 if call.never_negative else 1.0), call.operands[1])

        with torch.no_grad(), CallSites(visit, signs=True):
            y = make(value * 1)
            return functional.conv2d(y, torch.ones(2, 4, 1, 1, dtype=y.dtype))

    expected = doubled(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(doubled, backend="aot_eager")(x), expected, equal_nan=True)


def test_nothing_is_kept_alive() -> None:
    """A value that nobody else holds is freed."""
    signs, x = Signs(), torch.randn(3)
    y = torch.relu(x)
    signs.ran(torch.relu, (x,), {}, y)
    assert signs.never_negative(y)
    assert not signs.never_negative(x)
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None
