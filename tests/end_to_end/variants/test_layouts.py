"""Inputs in every arrangement of memory, and another arrangement in a later call of the same compiled function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.end_to_end.variants.harness import Make, check

Arrange = Callable[[torch.Tensor], torch.Tensor]


def _numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator)


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t.clone()


def _strided(t: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(*t.shape[:-1], t.shape[-1] * 3)
    return room[..., 1::3].copy_(t)


def _offset(elements: int) -> Arrange:
    return lambda t: torch.zeros(t.numel() + elements)[elements:].view(t.shape).copy_(t)


def _misaligned(odd_bytes: int) -> Arrange:
    """Data that begins `odd_bytes` behind a multiple of 64."""

    def arrange(t: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(t.numel() * t.element_size() + 128, dtype=torch.uint8)
        start = -room.data_ptr() % 64 + odd_bytes
        # frombuffer takes any offset; a byte view into float32 would refuse an odd one.
        raw = torch.frombuffer(memoryview(room.numpy()), dtype=t.dtype, count=t.numel(), offset=start)  # type: ignore[call-overload]
        assert raw.data_ptr() % 64 == odd_bytes
        return raw.view(t.shape).copy_(t)

    return arrange


def _expanded(t: torch.Tensor) -> torch.Tensor:
    return t[:1].clone().expand(t.shape)


def _column(t: torch.Tensor) -> torch.Tensor:
    """Stride 0 in the last dimension."""
    return t[..., :1].clone().expand(t.shape)


def _reversed(t: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(t.ndim)))
    return t.permute(order).contiguous().permute(order)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.channels_last) if t.ndim == 4 else t


ARRANGEMENTS: dict[str, Arrange] = {
    "contiguous": torch.clone,
    "transposed": _transposed,
    "strided": _strided,
    "offset by 1": _offset(1),
    "offset by 16": _offset(16),
    "misaligned by 1 byte": _misaligned(1),
    "misaligned by 2 bytes": _misaligned(2),
    "misaligned by 4 bytes": _misaligned(4),
    "misaligned by 16 bytes": _misaligned(16),
    "misaligned by 32 bytes": _misaligned(32),
    "expanded rows": _expanded,
    "expanded columns": _column,
    "reversed": _reversed,
    "channels_last": _channels_last,
}

FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "pointwise": (lambda x, y: (x * y).sigmoid() + y, (_numbers(3, 5, 7, 9), _numbers(3, 5, 7, 9))),
    "broadcast": (lambda x, y: torch.relu(x - y) * 2, (_numbers(6, 10, 16), _numbers(10, 16))),
    "reduction": (lambda x: (x.exp().sum(-1), x.amax(0), x.mean((0, 2), keepdim=True)), (_numbers(5, 6, 33),)),
    "softmax": (lambda x: torch.softmax(x * 0.5, -1), (_numbers(4, 9, 40),)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (24,), w, eps=0.1), (_numbers(7, 24), _numbers(24))),
    "matmul": (lambda x, y: torch.relu(x @ y), (_numbers(19, 32), _numbers(32, 21))),
    "bmm": (lambda x, y: torch.bmm(x, y) * 0.5, (_numbers(3, 8, 16), _numbers(3, 16, 10))),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (_numbers(6, 40), _numbers(30, 40), _numbers(30))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).relu(), (_numbers(2, 5, 9, 11), _numbers(18, 5, 3, 3))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=16), (_numbers(1, 16, 8, 8), _numbers(16, 1, 3, 3))),
    "max_pool": (lambda x: F.max_pool2d(x + 1, 3, 2, 1), (_numbers(2, 4, 9, 9),)),
    "cat": (lambda x, y: torch.cat((x, y * 2, x), 1), (_numbers(4, 3, 5), _numbers(4, 2, 5))),
    "index": (lambda x: x[:, torch.tensor([2, 0, 2])] * 2, (_numbers(5, 4, 6),)),
    "views": (lambda x: x.permute(2, 0, 1).reshape(6, -1)[1:, ::2].sin(), (_numbers(5, 4, 6),)),
}


def _maker(tensors: tuple[torch.Tensor, ...], arrange: Arrange, scale: float = 1.0) -> Make:
    return lambda: tuple(arrange(t * scale) for t in tensors)


# Fourteen arrangements of each: the rest is for `make test-full`.
_FAST = ("pointwise", "reduction", "matmul", "convolution", "views")


@pytest.mark.parametrize(
    "name", [name if name in _FAST else pytest.param(name, marks=pytest.mark.full) for name in FUNCTIONS]
)
def test_arrangements(name: str) -> None:
    """Every arrangement of the inputs gives eager's results, first call and later ones; other values do too.

    One compiled function serves them all: those that differ in strides are graphs of their own, those that differ in offset or alignment
    alone are the same graph called with other memory.
    """
    function, tensors = FUNCTIONS[name]
    makers = [_maker(tensors, arrange) for arrange in ARRANGEMENTS.values()]
    makers += [_maker(tensors, arrange, -0.75) for arrange in list(ARRANGEMENTS.values())[3:10]]
    with torch._dynamo.config.patch(recompile_limit=len(makers) + 1):
        check(function, *makers, times=2)


@pytest.mark.parametrize("first", ["misaligned by 1 byte", "offset by 1", "contiguous"])
def test_alignment_is_no_guard(first: str) -> None:
    """A graph made with inputs of one alignment is right for inputs of any other, without another compilation."""
    function, tensors = FUNCTIONS["matmul"]
    others = [
        ARRANGEMENTS[name] for name in ("contiguous", "misaligned by 2 bytes", "offset by 16", "misaligned by 32 bytes")
    ]
    fast = check(function, *(_maker(tensors, arrange) for arrange in (ARRANGEMENTS[first], *others)))
    assert len(fast.plans) == 1


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x.relu() * 2 + 1, ((0,),)),
        (lambda x: (x.exp().sum(1), x.sum(0), x.sum()), ((0, 5),)),
        (lambda x: (x.exp().sum(1), x.mean(0) if x.shape[0] else x.sum(0)), ((5, 0),)),
        (lambda x, y: (x @ y) + 1, ((4, 0), (0, 3))),
        (lambda x, y: (x @ y) + 1, ((0, 4), (4, 3))),
        (lambda x, y: torch.cat((x, y)) * 2, ((0, 3), (2, 3))),
        (lambda x: torch.softmax(x, -1) * 2, ((0, 7),)),
        (lambda x, w: F.conv2d(x, w).relu(), ((0, 3, 8, 8), (4, 3, 3, 3))),
        (lambda x: x[2:2].sin().reshape(0, 3, 2), ((4, 6),)),
        (lambda x: F.layer_norm(x, (8,)) * 3, ((0, 8),)),
    ],
)
def test_nothing_in_it(function: Callable[..., object], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Tensors without elements give what eager gives: empty results, zeros of sums, NaN of means."""
    torch._dynamo.reset()
    from tests.end_to_end.variants.harness import assert_same, compiled, forced, observe

    fast = compiled(function)
    with forced():
        for _ in range(3):
            arguments = tuple(torch.ones(shape) for shape in shapes)
            assert_same(observe(fast.call, arguments), observe(function, arguments))


def test_scalars() -> None:
    """Tensors of rank 0, alone, against others, and as results."""

    def function(x: torch.Tensor, s: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * s + n, s.exp(), x.sum(), (x > s).sum(), n + 1, s.expand(3, 2), torch.stack((s, s * 2))

    check(function, *(lambda k=k: (_numbers(4, 6), torch.tensor(0.5 + k), torch.tensor(3 * k)) for k in range(3)))


def test_ones_have_any_stride() -> None:
    """The stride of a dimension of one element says nothing; whatever it is, the results are right."""

    def odd(t: torch.Tensor) -> torch.Tensor:
        return t.clone().as_strided(t.shape, (977, *t.stride()[1:]))

    makers: list[Make] = [
        lambda: (_numbers(1, 6, 8), _numbers(1, 8, 5)),
        lambda: (odd(_numbers(1, 6, 8)), odd(_numbers(1, 8, 5))),
    ]
    check(lambda x, y: torch.softmax(x @ y, -1) + 1, *makers, *reversed(makers))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool],
)
@pytest.mark.parametrize(
    "arrangement", ["misaligned", *(pytest.param(a, marks=pytest.mark.full) for a in ("transposed", "expanded rows"))]
)
def test_dtypes(dtype: torch.dtype, arrangement: str) -> None:
    """Arrangements of the other dtypes; data that begins at an odd address among them."""

    def arrange(t: torch.Tensor) -> torch.Tensor:
        return _misaligned(1)(t) if arrangement == "misaligned" else ARRANGEMENTS[arrangement](t)

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(arrange((t * 3).to(dtype)) for t in (_numbers(5, 12), _numbers(5, 12) + 1))

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.where(x > y, x, y), (x == y).sum(0), x.to(torch.float32) * 2

    check(function, make)
