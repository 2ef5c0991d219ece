"""Programs that eager refuses are refused: by the same class of error, in the first call and in every call after it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend

X = torch.randn(5, 4)
ROWS = torch.randn(8, 4)
MANY = torch.tensor([0, 1, 2, 3, 4, 4, 3, 2])


def _at(*places: int) -> torch.Tensor:
    return torch.tensor(places)


def _columns(*places: int) -> torch.Tensor:
    return torch.tensor(places).expand(5, len(places)).clone()


# name -> (function, what it takes, what it refuses)
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
INDICES: dict[str, Case] = {
    "embedding": (lambda w, i: functional.embedding(i, w) + 1, (X, _at(0, 4)), (X, _at(0, 5))),
    "embedding of -1": (lambda w, i: functional.embedding(i, w) + 1, (X, _at(0, 4)), (X, _at(0, -1))),
    "x[i]": (lambda x, i: x[i] * 2, (X, _at(-5, 4)), (X, _at(0, 5))),
    "x[i] from the end": (lambda x, i: x[i] * 2, (X, _at(-5, 4)), (X, _at(0, -6))),
    "x[i, j]": (lambda x, i, j: x[i, j] * 2, (X, _at(0, 1), _at(1, 3)), (X, _at(0, 1), _at(1, 4))),
    "x[:, i]": (lambda x, i: x[:, i] * 2, (X, _at(0, 3)), (X, _at(0, 4))),
    "x[2 i + 1]": (lambda x, i: x[2 * i + 1] * 2, (X, _at(0, 1)), (X, _at(0, 2))),
    "gather": (lambda x, i: x.gather(1, i) * 2, (X, _columns(0, 3)), (X, _columns(0, 4))),
    "gather of -1": (lambda x, i: x.gather(1, i) * 2, (X, _columns(0, 3)), (X, _columns(0, -1))),
    "index_select": (lambda x, i: x.index_select(0, i) * 2, (X, _at(0, 4)), (X, _at(0, 5))),
    "index_select, int32": (lambda x, i: x.index_select(0, i) * 2, (X, _at(0, 4).int()), (X, _at(0, -1).int())),
    "take": (lambda x, i: x.take(i) * 2, (X, _at(0, -20)), (X, _at(0, 20))),
    "scatter": (lambda x, i, s: x.scatter(1, i, s) * 2, (X, _columns(0, 3), X[:, :2]), (X, _columns(0, 4), X[:, :2])),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 3.0) * 2, (X, _columns(0, 3)), (X, _columns(0, -1))),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s) * 2,
        (X, _columns(0, 3), X[:, :2]),
        (X, _columns(0, 4), X[:, :2]),
    ),
    "index_put": (lambda x, i, s: x.index_put((i,), s) * 2, (X, _at(0, -5), X[:2]), (X, _at(0, -6), X[:2])),
    "index_put, added": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True) * 2,
        (X, MANY, ROWS),
        (X, MANY + 1, ROWS),
    ),
    "index_add": (lambda x, i, s: x.index_add(0, i, s) * 2, (X, _at(0, 4), X[:2]), (X, _at(0, 5), X[:2])),
    "index_add of many": (lambda x, i, s: x.index_add(0, i, s) * 2, (X, MANY, ROWS), (X, MANY + 1, ROWS)),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s) * 2, (X, _at(0, 4), X[:2]), (X, _at(0, 5), X[:2])),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0) * 2, (X, _at(0, 4)), (X, _at(0, 5))),
    "nll_loss": (
        lambda x, t: functional.nll_loss(x.log_softmax(1), t),
        (X, _at(0, 1, 2, 3, -100)),
        (X, _at(0, 1, 2, 4, 0)),
    ),
    "cross_entropy": (functional.cross_entropy, (X, _at(0, 1, 2, 3, -100)), (X, _at(0, 1, 2, -1, 0))),
    "cross_entropy of pixels": (
        functional.cross_entropy,
        (X.reshape(1, 5, 2, 2), torch.full((1, 2, 2), 4)),
        (X.reshape(1, 5, 2, 2), torch.full((1, 2, 2), 5)),
    ),
    "concatenated": (
        lambda x, i: torch.cat([x.gather(0, i[:, None].expand(2, 4)), x]),
        (X, _at(0, 4)),
        (X, _at(0, 5)),
    ),
}
DIVISORS: dict[str, Case] = {
    "a // b": (lambda a, b: a // b + 1, (_at(4, -5), _at(2, -1)), (_at(4, -5), _at(2, 0))),
    "a % b": (lambda a, b: a % b + 1, (_at(4, -5), _at(2, -1)), (_at(4, -5), _at(2, 0))),
    "fmod": (lambda a, b: a.fmod(b) + 1, (_at(4, -5), _at(2, -1)), (_at(4, -5), _at(2, 0))),
    "truncated": (
        lambda a, b: torch.div(a, b, rounding_mode="trunc") + 1,
        (_at(4, -5).int(), _at(2, -1).int()),
        (_at(4, -5).int(), _at(2, 0).int()),
    ),
    "a number by b": (lambda b: 7 // b + 1, (_at(2, -1),), (_at(2, 0),)),
    "a number modulo b": (lambda b: 7 % b + 1, (_at(2, -1).to(torch.uint8),), (_at(2, 0).to(torch.uint8),)),
    "rows by one b": (lambda a, b: a.expand(3, 2) // b, (_at(4, -5), _at(2)), (_at(4, -5), _at(0))),
}


def _error(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*inputs)
    return caught.value  # type: ignore[return-value]


def _fresh(inputs: tuple[torch.Tensor, ...], *, grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(x.clone().requires_grad_(grad and x.is_floating_point()) for x in inputs)


@pytest.mark.parametrize("case", [*INDICES.values(), *DIVISORS.values()], ids=[*INDICES, *DIVISORS])
def test_a_later_call_refuses_what_eager_does(case: Case) -> None:
    """An index out of range or a divisor of 0 raises what eager raises, in any call; the compiled graph answers the calls around it."""
    function, good, bad = case
    expected = _error(function, _fresh(bad))
    compiled = torch.compile(function, backend="hybrid", dynamic=False)
    for inputs in (good, bad, good, bad):
        if inputs is good:
            torch.testing.assert_close(compiled(*_fresh(inputs)), function(*_fresh(inputs)))
            continue
        raised = _error(compiled, _fresh(inputs))
        assert (type(raised), str(raised)) == (type(expected), str(expected))


@pytest.mark.parametrize("name", ["embedding", "x[i]", "index_add", "cross_entropy", "scatter"])
def test_training_refuses_it(name: str) -> None:
    """Before anything is saved for backward; the next step trains on."""
    function, good, bad = INDICES[name]
    expected = _error(function, _fresh(bad, grad=True))
    compiled = torch.compile(function, backend="hybrid", dynamic=False)
    for _ in range(2):
        inputs, own = _fresh(good, grad=True), _fresh(good, grad=True)
        compiled(*inputs).sum().backward()
        function(*own).sum().backward()
        torch.testing.assert_close(inputs[0].grad, own[0].grad)
        raised = _error(compiled, _fresh(bad, grad=True))
        assert (type(raised), str(raised)) == (type(expected), str(expected))


@pytest.mark.parametrize("name", ["embedding", "x[i]", "a % b"])
def test_a_first_call_that_nobody_checks_refuses_it(name: str) -> None:
    """With `verify=off` eager is not asked in the first call; it is where kernels meet such values."""
    function, good, bad = (INDICES | DIVISORS)[name]
    compiled = torch.compile(function, backend="hybrid", dynamic=False, options={"verify": "off"})
    for inputs in (bad, good, bad):
        if inputs is good:
            torch.testing.assert_close(compiled(*_fresh(inputs)), function(*_fresh(inputs)))
        else:
            assert str(_error(compiled, inputs)) == str(_error(function, inputs))


@pytest.mark.parametrize("name", ["embedding", "gather", "index_put, added"])
def test_sizes_of_any_call_are_those_that_count(name: str) -> None:
    """An index is compared with the sizes of its call where sizes are known only at run time."""
    function, good, _ = INDICES[name]
    compiled = torch.compile(function, backend="hybrid", dynamic=True)
    for rows in (5, 7, 6):
        x, *rest = good
        larger = torch.randn(rows, x.shape[1] + rows)
        if name == "gather":
            index, wrong = torch.full((rows, 3), larger.shape[1] - 1), torch.full((rows, 3), larger.shape[1])
            inputs, refused = (larger, index), (larger, wrong)
        else:
            at = torch.arange(rows).repeat(2)
            values = [torch.randn(2 * rows, larger.shape[1])] if len(rest) == 2 else []
            inputs, refused = (larger, at, *values), (larger, at + 1, *values)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
        expected, raised = _error(function, refused), _error(compiled, refused)
        assert (type(raised), str(raised)) == (type(expected), str(expected))


class Counter(nn.Module):
    """A table, and where the next call reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, 3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        row = self.table[self.position] * scale
        self.seen.index_put_((self.position,), row)
        self.position += 1
        return row


@torch.no_grad()
def test_what_a_call_writes_is_what_eager_wrote_before_it_raised() -> None:
    """A step past the end of a cache raises, and the counter is where eager's is; the model goes on from there."""
    model, own = Counter(), Counter()
    own.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="hybrid", dynamic=False)
    for step in range(6):
        scale = torch.tensor(float(step))
        if step < 4:
            torch.testing.assert_close(compiled(scale), own(scale))
        else:
            assert type(_error(compiled, (scale,))) is type(_error(own, (scale,)))
        torch.testing.assert_close(dict(model.named_buffers()), dict(own.named_buffers()))
    model.position.zero_()
    torch.testing.assert_close(compiled(torch.tensor(1.0)), model.table[:1])


def test_the_error_names_the_line_and_what_it_was_given() -> None:
    """PyTorch's text stays as it is; the traceback tells the user's line, the range of the indices and the sizes."""
    compiled = torch.compile(lambda w, i: functional.embedding(i, w) + 1, backend="hybrid", dynamic=False)
    compiled(X, _at(0, 4))
    error = _error(compiled, (X, _at(1, 9)))
    assert str(error) == "index out of range in self"
    shown = "".join(traceback.format_exception(error))
    for part in ("test_refused_inputs.py", "functional.embedding(i, w) + 1", "float32 (5, 4)", "int64 (2,) of 1 to 9"):
        assert part in shown


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_flag_for_all_tables() -> None:
    """A small kernel looks at the indices for all of one shape, beside the one that reads the tables."""
    users, items = nn.Embedding(50, 16), nn.Embedding(90, 16)
    with torch.no_grad():
        found = torch_hybrid_backend.explain(lambda u, i: users(u) * items(i), MANY, MANY, dynamic=False)
    (plan,) = found.plans
    kernels = [kernel for region in plan.regions for kernel in region.kernels]
    assert len(kernels) == 2
    assert sum("row_any" in kernel for kernel in kernels) == 1


F64, I64 = X.double(), torch.randint(1, 3, (5, 4))
MISTAKES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mm": (lambda a, b: a @ b, (X, I64.t())),
    "mm of half and float": (lambda a, b: a @ b, (X.half(), X.t())),
    "addmm": (torch.addmm, (I64[:, :1], X, X.t())),
    "linear": (functional.linear, (X, I64, X[:, 0])),
    "linear with a bias": (functional.linear, (X, X, F64[:, 0])),
    "layer_norm": (lambda x, w: functional.layer_norm(x, (4,), w), (X, F64[0])),
    "group_norm": (lambda x, w: functional.group_norm(x, 2, w), (X, F64[0])),
    "batch_norm": (lambda x, m: functional.batch_norm(x, m, m + 1), (X, F64[0])),
    "cross_entropy": (functional.cross_entropy, (X, I64[:, 0].int())),
    "nll_loss": (functional.nll_loss, (X, I64[:, 0], F64[0])),
    "binary_cross_entropy": (lambda x, t: functional.binary_cross_entropy(x.sigmoid(), t), (X, F64)),
    "var of integers": (lambda x: x.var(1), (I64,)),
    "relu of bools": (functional.relu, (I64 > 1,)),
    "argmax of bools": (lambda x: x.argmax(1), (I64 > 1,)),
    "index_select by floats": (lambda x, i: x.index_select(0, i) + 1, (X, X[0].abs())),
    "index_select by int16": (lambda x, i: x.index_select(0, i) + 1, (X, I64[0].to(torch.int16))),
    "grid_sample": (
        lambda x, g: functional.grid_sample(x[None, None], g[None, None, :, :2], align_corners=False),
        (X, F64),
    ),
}


@pytest.mark.parametrize("options", [None, {"verify": "off"}], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_dtypes_that_do_not_go_together_are_refused(
    case: tuple[Callable[..., Any], tuple[torch.Tensor, ...]], options: dict[str, object] | None
) -> None:
    """Kernels could compute something of them, and fake tensors take them: every call raises as eager does."""
    function, inputs = case
    expected = _error(function, inputs)
    compiled = torch.compile(function, backend="hybrid", dynamic=False, options=options)
    for _ in range(2):
        raised = _error(compiled, inputs)
        assert (type(raised), str(raised)) == (type(expected), str(expected))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.adaptive_avg_pool2d(x, 2),
        lambda x: functional.adaptive_max_pool2d(x, 2),
        lambda x: x.softmax(-1),
    ],
)
def test_integers_where_eager_has_no_kernel_for_them(function: Callable[..., torch.Tensor]) -> None:
    """Averages and the like of integers are a mistake: eager's error comes from every call, also where nothing is verified."""
    pixels = torch.arange(32).reshape(1, 2, 4, 4)
    with pytest.raises(NotImplementedError) as expected:
        function(pixels)
    for options in ({}, {"verify": "off"}):
        torch.compiler.reset()
        compiled = torch.compile(function, backend="hybrid", dynamic=False, options=options)
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=re.escape(str(expected.value))):
                compiled(pixels)


class Attending(nn.Module):
    """Words of a table, which attend to each other as a model writes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.words(words)).view(*words.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 3.0).softmax(-1)
        return weights @ v


@torch.no_grad()
def test_a_flag_stays_in_a_graph_that_is_rewritten() -> None:
    """A flag stays where written attention becomes one operation: what looks at the indices is still there, and the region is not lost."""
    model, words = Attending().eval(), torch.randint(20, (2, 12))
    plans = torch_hybrid_backend.explain(model, words, dynamic=False, options={"strict": True}).plans
    kernels = [kernel for plan in plans for region in plan.regions for kernel in region.kernels]
    assert any("attention" in kernel for kernel in kernels)
    assert any("any" in kernel for kernel in kernels)
    compiled = torch.compile(model, backend="hybrid", dynamic=False)
    torch.testing.assert_close(compiled(words), model(words), rtol=1e-4, atol=1e-5)
    words[1, 3] = 20
    assert isinstance(_error(compiled, (words,)), IndexError)
