"""`Signs`: which values cannot be negative, in eager and in what Dynamo traces; what is written to is not believed any more."""

from __future__ import annotations

import gc
import operator
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


def _in_place(function: Callable[..., object], *others: object) -> Make:
    """A function that writes to what was never negative, and yields nothing of use: that is what Dynamo shows no mode, if it is no method."""

    def make(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        function(y, *others)
        return y

    return make


@torch.compiler.allow_in_graph
def _allowed(x: torch.Tensor) -> torch.Tensor:
    return x.neg_()


_scripted = torch.jit.CompilationUnit("def negate(x):\n    x.neg_()\n").negate


def _join(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.relu(x), functional.max_pool2d(torch.sigmoid(x), 3, 1, 1)], dim=1)[:, ::2]


def _under_no_grad(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x.sum()
    return y


_LIBRARY = torch.library.Library("hybrid_signs_test", "DEF")
_LIBRARY.define("negate(Tensor(a!) x) -> ()")
_LIBRARY.impl("negate", lambda x: [x.neg_(), None][1], "CompositeExplicitAutograd")
_LIBRARY.define("relu(Tensor x) -> Tensor")
_LIBRARY.impl("relu", lambda x: x - 1, "CompositeExplicitAutograd")


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
    "softplus": nn.Softplus(),
    "by names of arguments": lambda x: torch.flatten(
        input=torch.cat(tensors=[torch.relu(input=x)] * 2, dim=1)[:, :4], start_dim=3
    ),
    "pooled": lambda x: functional.avg_pool2d(functional.max_pool2d(functional.relu(x), 3, 1, 1), 3, 1, 1),
    "viewed": lambda x: torch.relu(x).flatten(2).view(x.shape).contiguous(),
    "gated": lambda x: torch.relu(x) * torch.sigmoid(x),
    "added": lambda x: torch.relu(x) + x.abs() + 1,
    "added in place": lambda x: torch.relu(x).add_(x.abs()),
    "joined": _join,
    "hardsigmoid": functional.hardsigmoid,
    "hardsigmoid in place": nn.Hardsigmoid(inplace=True),
    "written by hardsigmoid in place": lambda x: [functional.hardsigmoid(x, inplace=True), x][1],
    "squeeze and excitation": lambda x: torch.relu(x) * functional.hardsigmoid(x.mean((2, 3), keepdim=True)),
    "pooled hardsigmoid": lambda x: functional.max_pool2d(nn.Hardsigmoid()(x), 2),
    "deprecated sigmoid": functional.sigmoid,
    "threshold": nn.Threshold(0.0, 0.0),
    "relu_": torch.relu_,
    "written by relu_": lambda x: [torch.relu_(x), x][1],
    "written by abs_ after all": lambda x: [torch.neg_(y := torch.relu(x)), torch.abs_(y), y][2],
    "beside hardswish": lambda x: [torch.relu(x), functional.hardswish(x)][0],
    "an operator's": torch.ops.aten.relu.default,
    "by a context": _under_no_grad,
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
    "clamp with its bounds swapped": lambda x: x.clamp(0.0, -1.0),
    "softplus turned over": lambda x: functional.softplus(x, beta=-1.0),
    "softplus that ends early": nn.Softplus(threshold=-10.0),
    "a pool with a divisor": lambda x: functional.avg_pool2d(torch.relu(x), 1, divisor_override=-1),
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
    "written by neg_": _in_place(torch.neg_),
    "written by neg_ of a view": lambda x: [y := torch.relu(x), torch.neg_(y.view(-1))][0],
    "written by neg_ after hardsigmoid": lambda x: [y := functional.hardsigmoid(x), torch.neg_(y)][0],
    "written by neg_ after relu_": lambda x: [torch.relu_(x), torch.neg_(x), x][2],
    "written by fill_": _in_place(torch.fill_, -1.0),
    "written by hardtanh_": _in_place(functional.hardtanh_, -1.0, -0.5),
    "written by a list": lambda x: [y := torch.relu(x), torch._foreach_neg_([y])][0],
    "written by a copied list": lambda x: [y := torch.relu(x), torch._foreach_copy_([y], [x])][0],
    "written by an operator": _in_place(torch.ops.aten.neg_.default),
    "written by a packet": _in_place(torch.ops.aten.neg_),
    "written by another library": _in_place(torch.ops.hybrid_signs_test.negate),
    "written by hardswish in place": lambda x: [y := torch.relu(x), functional.hardswish(y, inplace=True)][0],
    "written by threshold in place": lambda x: [y := torch.relu(x), functional.threshold(y, 1.0, -1.0, inplace=True)][
        0
    ],
    "written by a function that Dynamo does not trace": _in_place(_allowed),
    "written by TorchScript": _in_place(_scripted),
    "set": lambda x: [y := torch.relu(x), y.set_(x)][0],
    "written by NumPy": lambda x: [y := torch.relu(x), y.numpy().__isub__(1.0)][0],
    "threshold": nn.Threshold(-1.0, 0.0),
    "threshold with a negative value": nn.Threshold(0.0, -1.0),
    "a sum in place": lambda x: [y := torch.relu(x), operator.isub(y, 1.0)][0],
    "namesake of another library": torch.ops.hybrid_signs_test.relu,
    "integers": lambda x: (torch.relu(x) * 300).to(torch.int8).square().float(),
    "bits by name": lambda x: torch.relu(x).view(dtype=torch.bfloat16)[..., ::2].contiguous(),
    "input by name": lambda x: torch.mean(input=x, dim=1, keepdim=True).expand(x.shape),
    "too long ago": _many,
}


def _told(make: Make, x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """True if the convolution of what `make` gives is told that this is never negative; and what it is."""
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
    signs.ended(signs.begins(torch.relu), (x,), {}, y)
    assert signs.never_negative(y)
    assert not signs.never_negative(x)
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None
