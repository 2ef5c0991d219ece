"""Dynamic shapes through torch.compile: one compilation serves every size, on the engine's kernels."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.end_to_end import models
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan


class Encoder(nn.Module):
    """A small transformer encoder over tokens, with a key mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(600, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length))
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mask = (tokens != 0)[:, None, None, :]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, 32))
        x = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return x.mean(1)


class Counted:
    """`model` compiled by this backend, with a plan for each graph that was compiled and called.

    (Dynamo's own counter also counts what it compiles and throws away when it starts over.)
    """

    def __init__(self, model: nn.Module | Callable[..., Any], dynamic: bool | None) -> None:
        self.plans: list[Plan] = []
        config = Config.from_env(os.environ).with_options({"strict": True}, None)
        backend = functools.partial(compile_graph, config=config, on_plan=self.plans.append)
        self.call = torch.compile(model, backend=backend, dynamic=dynamic)

    def left_to_eager(self) -> set[str]:
        nodes = [node for plan in self.plans for node in plan.nodes]
        return {n.operator for n in nodes if n.engine == "eager" and n.operator.startswith("aten")}


def _tokens(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(1, 50, (batch, length), generator=generator)


THIRTY = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    11,
    13,
    15,
    16,
    17,
    23,
    31,
    32,
    33,
    47,
    63,
    64,
    65,
    90,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
    257,
)


def _check(model: nn.Module, found: torch.Tensor, *inputs: torch.Tensor) -> None:
    exact = copy.deepcopy(model).double()(*(t.double() if t.is_floating_point() else t for t in inputs))
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-5)


def test_thirty_lengths_and_batches_are_one_compilation() -> None:
    """Batch and length vary over thirty values each: one graph is compiled, all of it on the engine, right at every size."""
    model = Encoder().eval()
    fast = Counted(model, dynamic=True)
    with torch.no_grad():
        for i, length in enumerate(THIRTY):
            batch = 2 + i % 7 if length > 40 else THIRTY[(i + 1) % 12]
            tokens = _tokens(batch, length)
            for _ in range(2):
                _check(model, fast.call(tokens), tokens)
    assert len(fast.plans) == 1
    assert fast.left_to_eager() == set()


@pytest.mark.parametrize("depth", [1024, 1030])
def test_limited_heights_of_tiles_are_right_at_every_count_of_rows(depth: int) -> None:
    """Rows whose number a call tells: tiles as tall as the first-level cache holds (1,024), or as a long epilogue leaves room for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(depth, 101), nn.GELU()).eval()
    fast = Counted(model, dynamic=True)
    with torch.no_grad():
        for rows in (401, *range(2, 32)):  # many first: they are what the estimate sees
            x = torch.randn(rows, depth)
            _check(model, fast.call(x), x)
    assert len(fast.plans) == 1
    assert fast.left_to_eager() == set()


@pytest.mark.full
def test_zero_and_one_are_right() -> None:
    """Dynamo compiles graphs of their own for 0 and 1; they and the sizes after them are right."""
    model = Encoder().eval()
    fast = Counted(model, dynamic=True)
    with torch.no_grad():
        for batch, length in [(3, 9), (1, 9), (0, 9), (4, 1), (1, 1), (5, 12), (1, 30)]:
            tokens = _tokens(batch, length)
            _check(model, fast.call(tokens), tokens)


class Decoder(nn.Module):
    """A step of decoding: a query against a cache of keys and values that grows by one."""

    def forward(
        self, q: torch.Tensor, new: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.cat([keys, new], 2), torch.cat([values, new.neg()], 2)
        return nn.functional.scaled_dot_product_attention(q, keys, values), keys


def test_a_cache_of_any_length() -> None:
    """A query attends to keys and values of every length: ragged panels of keys, whole ones, and several blocks of them."""
    model = Decoder()
    fast = Counted(model, dynamic=None)
    torch.manual_seed(0)
    with torch.no_grad():
        for length in (5, 30, 31, 32, 63, 97, 1023, 1100):
            q, new = torch.randn(2, 3, 1, 32), torch.randn(2, 3, 1, 32)
            keys, values = torch.randn(2, 3, length, 32), torch.randn(2, 3, length, 32)
            for cache in (keys, values):
                torch._dynamo.mark_dynamic(cache, 2)
            found = fast.call(q, new, keys, values)[0]
            exact = model(*(t.double() for t in (q, new, keys, values)))[0]
            torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-5)
    assert len(fast.plans) == 1


def test_the_second_size_makes_one_dynamic_graph() -> None:
    """By default the first size is compiled as it is, the second for all sizes, and no third compilation follows."""
    model = models.convolutional().eval()
    fast = Counted(model, dynamic=None)
    with torch.no_grad():
        for batch in (2, 3, 4, 5, 7, 11, 15):  # from 16 on, torch itself compiles convolutions anew
            x = torch.randn(batch, *models.images().shape[1:])
            _check(model, fast.call(x), x)
    assert len(fast.plans) == 2
    assert fast.left_to_eager() == set()


@pytest.mark.full
def test_marked_dimensions_are_dynamic() -> None:
    """mark_dynamic makes the first compilation serve all lengths; a graph that were specialised would raise."""
    model = Encoder().eval()
    fast = Counted(model, dynamic=None)
    with torch.no_grad():
        for length in (8, 5, 33, 128):
            tokens = _tokens(3, length)
            torch._dynamo.mark_dynamic(tokens, 1)
            _check(model, fast.call(tokens), tokens)
    assert len(fast.plans) == 1


def test_dynamic_training() -> None:
    """Forward and backward graphs serve varying sizes with one compilation, and gradients follow eager's in float64."""
    model = Encoder()
    fast = Counted(model, dynamic=True)
    for batch, length in [(3, 9), (2, 16), (5, 33), (4, 7)]:
        tokens = _tokens(batch, length)
        exact = copy.deepcopy(model).double()
        exact.zero_grad()
        exact(tokens).square().sum().backward()
        model.zero_grad()
        fast.call(tokens).square().sum().backward()
        for (name, parameter), other in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(
                parameter.grad, other.grad.float(), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert [plan.kind for plan in fast.plans] == ["forward", "backward"]


def test_weights_are_packed_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes share packed weights, and a changed weight is seen at every size."""
    model = models.perceptron()
    packings = 0
    fast = Counted(model, dynamic=True)
    first = next(p for p in model.parameters() if p.dim() == 2)
    new_zeros = torch.Tensor.new_zeros

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal packings
        packings += 1
        return new_zeros(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)
    with torch.no_grad():
        for batch in (3, 5, 64):  # the last is one that eager does not win
            _check(model, fast.call(models.rows(batch)), models.rows(batch))
        assert packings
        packings = 0
        for batch in (7, 16, 33, 65):
            fast.call(models.rows(batch))
        assert packings == 0
        first.mul_(-1)
        for batch in (7, 3, 64):
            _check(model, fast.call(models.rows(batch)), models.rows(batch))


@pytest.mark.full
def test_threads_at_several_sizes() -> None:
    """Four threads that call one dynamic graph at sizes of their own get eager's values."""
    model = Encoder().eval()
    fast = Counted(model, dynamic=True)
    with torch.no_grad():
        fast.call(_tokens(3, 8))
    wrong: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            with torch.no_grad():
                for i in range(25):
                    tokens = _tokens(2 + (seed + i) % 3, 4 + (seed * 7 + i * 3) % 40)
                    torch.testing.assert_close(fast.call(tokens), model(tokens), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not wrong
    assert len(fast.plans) == 1


@pytest.mark.parametrize("wrap", [lambda x: {"y": x + 1, "n": x.shape[0] * 2}, lambda x: (x.shape[1], x * x.shape[0])])
def test_sizes_are_outputs(wrap: Callable[[torch.Tensor], Any]) -> None:
    """Sizes that a graph returns are Python numbers of the call."""
    fast = Counted(wrap, dynamic=True)
    for shape in [(3, 4), (5, 9), (2, 40)]:
        x = torch.randn(shape)
        torch.testing.assert_close(fast.call(x), wrap(x))
    assert len(fast.plans) == 1


def test_ragged_dimensions() -> None:
    """Nested tensors whose sequences differ in length: results and gradients are eager's, whatever the lengths."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    compiled = torch.compile(model, backend="hybrid")
    for lengths in [(3, 5), (4, 7, 1), (2, 2, 2)]:
        x = torch.nested.nested_tensor([torch.randn(length, 8) for length in lengths], layout=torch.jagged)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = compiled(mine), model(theirs)
        assert result.shape == expected.shape
        torch.testing.assert_close(result.values(), expected.values())
        for values in (result.values(), expected.values()):
            (values * torch.arange(8.0)).sum().backward()
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.values(), theirs.grad.values())


@pytest.mark.parametrize("arguments", [{"size": 21}, {"scale_factor": 2.0}, {"size": 5, "mode": "linear"}])
def test_resampling_of_any_batch_runs_on_the_engine(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The sizes that are resampled are numbers, the batch is not: an engine takes it, without a warning."""
    plans: list[Plan] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x.sin(), **arguments).cos()

    backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
    fast = torch.compile(model, backend=backend)
    for batch in (3, 5):
        x = torch.randn(batch, 3, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert {node.engine for plan in plans for node in plan.nodes if "upsample" in node.operator} == {"tvm"}
    assert len(plans) == 1
    assert not caplog.records


def _resample(mode: str, scaled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if scaled:
            return nn.functional.interpolate(x.sin(), scale_factor=n.item(), mode=mode, recompute_scale_factor=True)
        return nn.functional.interpolate(x.sin(), size=int(n.item()), mode=mode).cos()

    return model


def _size(n: torch.Tensor) -> int:
    size = int(n.item())
    torch._check(size >= 2)
    torch._check(size <= 8)
    return size


@pytest.mark.parametrize(
    "model",
    [
        _resample("nearest", False),
        _resample("nearest", True),
        _resample("linear", False),
        lambda x, n: nn.functional.pad(x.sin(), (0, _size(n))).cos(),
        lambda x, n: nn.functional.pad(x.sin(), (0, _size(n)), mode="replicate").cos(),
        lambda x, n: x.sin()[:, :, : _size(n)].softmax(-1),
        lambda x, n: x.sin().unsqueeze(0).expand(_size(n), *x.shape).cos(),
        lambda x, n: torch.arange(_size(n)).float().cos() + x.sum(),
        lambda x, n: nn.functional.avg_pool1d(nn.functional.pad(x.sin(), (0, _size(n))), 2).cos(),
        lambda x, n: nn.functional.max_pool2d(nn.functional.pad(x.sin(), (0, _size(n))), (1, 2)).cos(),
    ],
    ids="nearest scale linear pad replicate slice expand arange average maximum".split(),
)
def test_sizes_that_depend_on_data(model: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    """A size that only a tensor's value tells: right at every value, refused with a code where engines refuse it, without a warning."""
    plans: list[Plan] = []
    backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
    fast = torch.compile(model, backend=backend)
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for value in (5.0, 3.0):
            torch.testing.assert_close(
                fast(x, torch.tensor(value)), model(x, torch.tensor(value)), rtol=1e-4, atol=1e-5
            )
    assert len(plans) == 1
    assert "symbolic_shape" in {r.code for node in plans[0].nodes for r in node.refusals}
    assert not caplog.records
