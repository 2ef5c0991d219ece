"""AOTAutograd's graph is kept where that is surely right: the second compilation does not trace, and gives what the first one gave."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch._dynamo.utils import counters

import torch_hybrid_backend
from tests.fake_devices import FakeDevices
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache import aot_cache
from torch_hybrid_backend.capture.cache.aot_cache import AotCache, capture_key
from torch_hybrid_backend.storage.store import Store


class Compiler:
    """Compiles through capture with a store; `traced` and `keys` tell of its last compilation."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.traced = 0
        self.keys: list[str | None] = []

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        counters.clear()
        self.keys = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.keys.append(capture_key(gm, inputs, ()))
            made = capture(
                gm, inputs, lambda captured: lambda given: captured.graph_module(*given), (), AotCache(self.store)
            )
            self.traced = counters["aot_autograd"]["total"]
            return made

        return torch.compile(function, backend=backend, **options)


@pytest.fixture
def compiler(tmp_path) -> Iterator[Compiler]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Compiler(Store.open(tmp_path))
    torch._dynamo.reset()


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    ).eval()


def quantized_net() -> nn.Module:
    return torch_hybrid_backend.quantize(small_net(), calibration="none")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def lifted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.5, -2.0, 3.0]) + torch.arange(3) + torch.tensor(7)


def literals(x: torch.Tensor) -> tuple[Any, ...]:
    return x + float("inf"), None, 3, x.to(torch.float16, memory_format=torch.preserve_format).float()


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * 2).t(), x.double().sum((0,), keepdim=True), x.argmax(-1)


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x.relu()
    return y.split(2, 1)[0] + torch.nn.functional.gelu(x[:, 1:3], approximate="tanh")


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(x, x)


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(1, 2, -1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


KEPT: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[torch.Tensor, ...]]] = {
    "convolutions": (small_net, (torch.randn(1, 3, 8, 8),)),
    "tied weights": (Tied, (torch.tensor([[1, 6, 0]]),)),
    "literals as tensors": (lambda: lifted, (torch.randn(2, 3),)),
    "outputs that are no tensors": (lambda: literals, (torch.randn(2, 3),)),
    "strides of outputs": (lambda: transposed, (torch.randn(4, 3),)),
    "autograd switched inside": (lambda: without_gradients, (torch.randn(3, 4),)),
    "attention": (lambda: attention, (torch.randn(6, 4),)),
    "strided input": (lambda: transposed, (torch.randn(3, 8)[:, ::2].t(),)),
    "autocast inside": (lambda: under_autocast, (torch.randn(3, 3),)),
    "operators by their packets": (lambda: lambda x: torch.ops.aten.mul(x, 2.5), (torch.randn(2, 3),)),
    "quantized layers": (quantized_net, (torch.randn(1, 3, 8, 8),)),
    "empty batch": (small_net, (torch.randn(0, 3, 8, 8),)),
}


@pytest.mark.parametrize("case", KEPT)
def test_second_compilation_does_not_trace(compiler, case):
    """The kept graph gives the same bits, strides and types of outputs as the traced one, and with inputs of other values too."""
    make, inputs = KEPT[case]
    function = make()
    with torch.no_grad():
        first = compiler(function)
        expected = first(*inputs)
        assert compiler.traced == 1
        second = compiler(function)
        torch.testing.assert_close(second(*inputs), expected, rtol=0, atol=0, check_stride=True)
        assert compiler.traced == 0
        others = tuple(x.flip(0) for x in inputs)
        torch.testing.assert_close(second(*others), function(*others), rtol=1e-5, atol=1e-6, check_stride=True)


def test_kept_graph_knows_parameters(tmp_path):
    """Parameters and buffers are known by the same names as in the traced graph, so that they may be packed ahead."""
    static: list[frozenset[str]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def compile_graph(captured: Any) -> Callable[[list[Any]], Any]:
            static.append(captured.static_inputs)
            return lambda given: captured.graph_module(*given)

        return capture(gm, inputs, compile_graph, (), AotCache(Store.open(tmp_path)))

    model = small_net()
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend=backend)(torch.randn(1, 3, 8, 8))
    assert static[0] == static[1]
    assert len(static[0]) == 8


def test_a_store_that_cannot_be_written_costs_calls_nothing(tmp_path):
    """The graph is called without AOTAutograd's wrapper as where it is kept: that depends on the graph alone."""
    (tmp_path / "captures").write_text("in the way")
    added: list[bool] = []

    class Watched(AotCache):
        def add(self, *graph: Any) -> bool:
            added.append(super().add(*graph))
            return added[-1]

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        cache = Watched(Store(tmp_path))
        return capture(gm, inputs, lambda captured: lambda given: captured.graph_module(*given), (), cache)

    torch._dynamo.reset()
    x = torch.randn(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(torch.relu, backend=backend)(x), x.relu())
    assert added == [True]


def test_outputs_that_share_memory_still_do(compiler):
    """A write to one result is seen through the other, as in eager, also where the graph was kept."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y[1:]

    x = torch.randn(3, 2)
    for traced in (1, 0):
        with torch.no_grad():
            whole, part = compiler(function)(x)
        assert compiler.traced == traced
        part.zero_()
        assert whole[1:].abs().sum() == 0
        assert whole[0].equal(x[0] * 2)


def test_changed_parameters_count(compiler):
    """Weights are inputs of the kept graph: another model of the same form has its own."""
    model, x = small_net(), torch.randn(1, 3, 8, 8)
    other = copy.deepcopy(model)
    with torch.no_grad():
        compiler(model)(x)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(compiler(other)(x), other(x))
        assert compiler.traced == 0


def write_to_input(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def view_of_input(x: torch.Tensor) -> torch.Tensor:
    return x[1:]


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


TRACED: dict[str, Callable[..., Any]] = {
    "writes to its input": write_to_input,
    "returns its input": lambda x: (x.view_as(x), x + 1),
    "returns a view of its input": view_of_input,
    "control flow": branch,
    "data-dependent size": lambda x: torch.nonzero(x > 0),
}


@pytest.mark.parametrize("case", TRACED)
def test_what_needs_more_than_the_graph_is_traced_anew(compiler, case):
    """Nothing is kept where AOTAutograd's wrapper, or more than plain operators, is part of the result."""
    function = TRACED[case]
    for _ in range(2):
        x, y = torch.ones(3, 3), torch.ones(3, 3)
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            torch.testing.assert_close(compiler(function)(x), function(y))
        assert x.equal(y)
        assert compiler.traced == 1


def test_statistics_that_are_updated_are_traced_anew(compiler):
    """A batch norm in training writes its statistics also without autograd."""
    model = nn.BatchNorm2d(3).train()
    for _ in range(2):
        other = copy.deepcopy(model)
        x = torch.randn(2, 3, 4, 4)
        with torch.no_grad():
            torch.testing.assert_close(compiler(model)(x), other(x))
        assert compiler.traced == 1
        torch.testing.assert_close(model.running_mean, other.running_mean)


def test_training_is_traced_anew(compiler):
    """Forward and backward graphs are not kept; gradients are right in every compilation."""
    model = nn.Linear(3, 2)
    for _ in range(2):
        model.zero_grad()
        compiler(model)(torch.ones(4, 3)).sum().backward()
        assert compiler.traced == 1
        torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 4.0))


def test_symbolic_sizes_are_traced_anew(compiler):
    """A graph with sizes known only at run time has no key."""
    for _ in range(2):
        compiled = compiler(lambda x: x.relu() + x.shape[0], dynamic=True)
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), x.relu() + rows)
        assert compiler.keys == [None]


def test_operators_of_other_libraries_have_no_key(compiler):
    """A custom operator has no key: its decomposition, or its result, may change with the program."""
    with torch.library._scoped_library("hybrid_kept", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        with torch.no_grad():
            assert compiler(lambda x: torch.ops.hybrid_kept.twice(x) + 1)(torch.ones(2)).equal(torch.full((2,), 3.0))
    assert compiler.keys == [None]


def test_graphs_on_a_gpu_have_no_key():
    """Graphs on a GPU have no key, as their attention operator depends on the GPU; so may they that only move a tensor there."""
    devices, keys = FakeDevices(), []
    x = devices.tensor(2, device="cpu")
    for function in (torch.relu, lambda x: torch.relu(x.to("cuda:1"))):
        devices.traced(function, x, on_graph=lambda gm, inputs: keys.append(capture_key(gm, inputs, ())))
    devices.traced(
        torch.relu,
        devices.tensor(2, device="cuda:0"),
        on_graph=lambda gm, inputs: keys.append(capture_key(gm, inputs, ())),
    )
    assert keys[0] is not None
    assert keys[1:] == [None, None]


def test_kernels_registered_for_aten_have_no_key(compiler):
    """While a program has its own kernel for any ATen operator, nothing is kept."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("frac", lambda x: x - x.floor(), "CPU", allow_override=True)
        with torch.no_grad():
            compiler(torch.relu)(torch.ones(2))
    assert compiler.keys == [None]


def test_decompositions_of_other_libraries_have_no_key(compiler, monkeypatch):
    """Also of a library whose name begins as torch's does."""

    def decomposed(x: torch.Tensor) -> torch.Tensor:
        return x - x.floor()

    decomposed.__module__ = "torchlike.decompositions"
    table = torch._decomp.global_decomposition_table["post_autograd"]
    monkeypatch.setitem(table, torch.ops.aten.frac.default, decomposed)
    assert _key(compiler, torch.relu, torch.ones(2)) is None


def test_kernels_that_vmap_registers_are_torchs(compiler):
    """A process that has used vmap, as transformers' masks do, keeps graphs."""
    torch.vmap(torch.relu)(torch.ones(2, 2))
    assert any(name.endswith("/FuncTorchBatched") for name in torch.library._impls)
    assert _key(compiler, torch.relu, torch.ones(2)) is not None


def _key(compiler: Compiler, function: Callable[..., Any], *inputs: torch.Tensor) -> str | None:
    with torch.no_grad():
        compiler(function)(*inputs)
    (key,) = compiler.keys
    return key


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y


def test_key_covers_what_shapes_the_result(compiler):
    """Dtypes, shapes, strides, shared memory, constants, default dtype and determinism: each gives a key of its own."""
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    keys = [_key(compiler, _scaled, x, y)]
    assert keys == [_key(compiler, _scaled, x, torch.zeros(4, 4))]
    keys.append(_key(compiler, _scaled, x.double(), y))
    keys.append(_key(compiler, _scaled, x[:1], y))
    keys.append(_key(compiler, _scaled, x.t(), y))
    both = torch.ones(2, 4, 4)
    keys.append(_key(compiler, _scaled, both[0], both[1]))
    keys.append(_key(compiler, _scaled, nn.Parameter(x), y))
    keys.append(_key(compiler, lambda x, y: x * 3 + y, x, y))
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(_key(compiler, _scaled, x, y))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        keys.append(_key(compiler, _scaled, x, y))
    finally:
        torch.use_deterministic_algorithms(False)
    assert None not in keys
    assert [keys.index(key) for key in keys] == list(range(len(keys)))


def test_key_does_not_count_graphs(compiler):
    """A graph that is a module, as exported ones are, has the number of the graphs before it in its traces: what else the process did."""
    model = small_net()
    keys = {_key(compiler, torch.fx.symbolic_trace(model), torch.randn(1, 3, 8, 8)) for _ in range(2)}
    assert len(keys) == 1
    assert None not in keys


def half_and_full(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        exact = torch.mm(x, x)
    half = torch.mm(x, x)
    return exact, half, half.softmax(-1), torch.nn.functional.mse_loss(half, half + 1)


def test_autocast_around_the_call(compiler):
    """Graphs traced under autocast are kept, for each of its dtypes; a kept one computes as it was traced: what autocast was off for stays
    float32, though autocast is on when it is called."""
    x = torch.randn(8, 8)
    keys = []
    for dtype in (torch.bfloat16, torch.float16):
        for traced in (1, 0):
            with torch.no_grad(), torch.autocast("cpu", dtype):
                found = compiler(half_and_full)(x)
                expected = half_and_full(x)
            assert compiler.traced == traced
            assert [part.dtype for part in found[:2]] == [torch.float32, dtype]
            for own, eager in zip(found, expected, strict=True):
                assert own.dtype is eager.dtype
                assert own.equal(eager)
        keys.append(compiler.keys)
    assert None not in keys[0] + keys[1]
    assert keys[0] != keys[1]


def test_calls_within_and_without_autocast(compiler):
    """The same function inside autocast and outside of it: two graphs, each kept as its own."""
    x = torch.randn(8, 8)
    for traced in (1, 0):
        function = compiler(lambda x: torch.mm(x, x))
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                assert function(x).dtype is torch.bfloat16
            assert compiler.traced == traced
            assert function(x).equal(torch.mm(x, x))
        assert compiler.traced == 2 * traced


def test_a_torch_function_that_was_replaced_has_no_key(compiler, monkeypatch):
    """A program that puts a function of its own in torch's place is traced."""
    monkeypatch.setattr(torch.nn.functional, "gelu", torch._dynamo.allow_in_graph(lambda x: x * 3))
    with torch.no_grad():
        assert compiler(lambda x: torch.nn.functional.gelu(x) + 1)(torch.ones(2)).equal(torch.full((2,), 4.0))
    assert compiler.keys == [None]


@pytest.mark.parametrize("damage", [b"", b"[]\n{}", b'["a"]\n{"nodes": [{"op": "call_function"}]}'])
def test_damaged_entry_is_traced_anew(compiler, damage):
    """An entry that cannot be read is dropped, and replaced by the graph traced in its place."""
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiler(transposed)(x)
        (key,) = compiler.keys
        compiler.store.remove("captures", key)
        compiler.store.put("captures", key, damage, suffix=".json")
        for traced in (1, 0):
            torch.testing.assert_close(compiler(transposed)(x), transposed(x))
            assert compiler.traced == traced


_PROGRAM = """
import sys, torch
from torch_hybrid_backend.capture.cache.aot_cache import capture_key
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU()).eval()
def backend(gm, inputs):
    print(capture_key(gm, inputs, (torch.ops.aten.gelu.default, torch.ops.aten.convolution.default)))
    return gm
with torch.no_grad():
    torch.compile(model, backend=backend)(torch.randn(1, 3, 8, 8))
"""


@pytest.mark.full
def test_key_is_the_same_in_every_process(tmp_path):
    """Neither hash seeds nor addresses enter the key."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    keys = {
        subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (key,) = keys
    assert len(key.strip()) == 64


def test_sources_are_part_of_the_key(compiler, monkeypatch):
    """Another version of this package's capture, or of torch, finds nothing of this one."""
    before = _key(compiler, _scaled, torch.ones(2), torch.ones(2))
    monkeypatch.setattr(aot_cache, "_versions", lambda: ("another",))
    assert _key(compiler, _scaled, torch.ones(2), torch.ones(2)) not in (before, None)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_are_not_kept(compiler):
    """A graph with a collective names a process group of this process: it is traced anew in each."""

    def program(x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "no such group"))

    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match="no such group"):
        compiler(program)(torch.ones(3))
    assert compiler.keys == [None]
