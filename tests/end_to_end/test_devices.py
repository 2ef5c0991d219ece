"""Tensors that are not on the CPU: eager runs what reads them, on any device, beside engines that run the rest.

There is no second device with memory here: "meta" stands for all. Its tensors have shapes, strides and a device, and no data that a host could
read by mistake.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import torch_hybrid_backend
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Reason


@pytest.fixture(autouse=True)
def nothing_falls_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No graph of these tests leaves the C++ plan, and no region loses its engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert [record.message for record in caplog.records if "torch_hybrid_backend" in record.name] == []


def check(model: Callable[..., Any], *inputs: torch.Tensor, calls: int = 3, dynamic: bool | None = None) -> Any:
    """Every call gives tensors of eager's device, dtype, sizes and strides, and its values where there are any."""
    compiled = torch.compile(model, backend="hybrid", dynamic=dynamic, options={"strict": True})
    for _ in range(calls):
        same(compiled(*inputs), model(*inputs))
    return compiled


def same(results: Any, expected: Any) -> None:
    for result, reference in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        torch.testing.assert_close(result, reference, check_device=True, check_stride=True)
        assert type(result) is type(reference)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Convolutional(nn.Module):
    """A batch norm to fold into a convolution, and a matrix to transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.norm(self.convolution(x))).mean((2, 3)))
        return result


class OnTwoDevices(nn.Module):
    """Layers on the CPU and on meta, and a tensor that goes from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(8, 8), nn.Linear(8, 8, device="meta")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.here(x)) * 2
        z = self.there(y) + 1
        return h, z.t(), h.detach().to("meta") + z, torch.tanh(self.here(h))


IMAGES = torch.empty(2, 3, 9, 9, device="meta")
ROWS = torch.empty(2, 8, device="meta")


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_a_linear_layer(grad: bool) -> None:
    """A Linear whose weight and input are elsewhere, its transposed weight made once, in inference; forward alone under grad mode."""
    with torch.set_grad_enabled(grad):
        check(nn.Linear(8, 3, device="meta"), ROWS)


@torch.no_grad()
def test_parameters_that_fold() -> None:
    """A batch norm on another device is folded into its convolution, and again when its parameters change by version or by address."""
    model = on_meta(Convolutional).eval()
    compiled = check(model, IMAGES)
    model.norm.weight.mul_(2)
    same(compiled(IMAGES), model(IMAGES))
    model.norm.weight.data = torch.empty(8, device="meta")
    same(compiled(IMAGES), model(IMAGES))
    text = str(torch_hybrid_backend.explain(model, IMAGES))
    assert "batch_norm" not in text
    assert "aten.t.default" not in text


@torch.inference_mode()
def test_inference_tensors() -> None:
    """Parameters that count no versions and that the host cannot read."""
    check(on_meta(Convolutional).eval(), IMAGES)


def test_training() -> None:
    """Gradients are where their parameters are, and of their layout; an optimiser steps."""
    model = on_meta(Convolutional).train()
    compiled = torch.compile(model, backend="hybrid", options={"strict": True})
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        compiled(IMAGES).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            same(parameter.grad, torch.empty_like(parameter))
        optimiser.step()
        optimiser.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_two_devices(dynamic: bool) -> None:
    """Tensors on the CPU are computed by an engine, right beside what is not; live weights of both."""
    torch.manual_seed(0)
    model = OnTwoDevices().eval()
    x = torch.randn(2, 8)
    compiled = check(model, x, ROWS, dynamic=dynamic)
    model.here.weight.mul_(2)
    model.there.weight.mul_(2)
    same(compiled(x, ROWS), model(x, ROWS))
    [plan] = torch_hybrid_backend.explain(model, x, ROWS, dynamic=dynamic).plans
    assert {region.engine for region in plan.regions} == {"tvm"}
    assert all(spec.device == CPU for region in plan.regions for spec in (*region.inputs, *region.outputs))
    [moved] = [node for node in plan.nodes if node.operator == "aten._to_copy.default"]
    assert [(refusal.engine, refusal.code) for refusal in moved.refusals] == [("tvm", Reason.DEVICE)]


def test_training_on_two_devices() -> None:
    """Gradients of the CPU's layers are eager's, though half of the graph has no values."""
    torch.manual_seed(0)
    eager = OnTwoDevices()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="hybrid", options={"strict": True})
    x = torch.randn(2, 8)
    for _ in range(2):
        for run in (eager, compiled):
            here, there, both, last = run(x, ROWS)
            torch.autograd.backward([here.sum() + last.sum(), there.sum() + both.sum()])
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        same(ours.grad, theirs.grad)


@torch.no_grad()
def test_sizes_that_vary() -> None:
    """A compilation serves every batch size of a graph on another device."""
    model = on_meta(Convolutional).eval()
    compiled = torch.compile(model, backend="hybrid", dynamic=True, options={"strict": True})
    for batch in (2, 5, 3, 2):
        images = torch.empty(batch, 3, 9, 9, device="meta")
        same(compiled(images), model(images))


@torch.no_grad()
def test_strides() -> None:
    """Inputs and results with strides of their own: transposed, channels last, of size 1, empty."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.transpose(1, -1) * 2, x + 1, x.permute(0, 2, 3, 1), x.mean(1, keepdim=True), x[:0]

    for shape in ((2, 3, 4, 5), (1, 3, 1, 5)):
        x = torch.empty(shape, device="meta")
        for given in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
            check(model, given)


@torch.no_grad()
def test_the_way_there() -> None:
    """A result moved to another device is no engine's to make; what made it still is."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x * 2)
        numbers = torch.arange(4, device="meta") * 2
        return y, y.to("meta") + 1, torch.zeros(3, device="meta"), numbers[1:] * x[0].to("meta")

    check(model, torch.randn(5))


@torch.no_grad()
def test_mutation() -> None:
    """An input and a buffer on another device that the graph writes to: their versions rise as in eager."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x.mul_(2) + self.count

    model, x = Counting(), torch.empty(3, device="meta")
    compiled = torch.compile(model, backend="hybrid", options={"strict": True})
    for _ in range(3):
        before = x._version, model.count._version
        same(compiled(x), model(x))
        assert x._version > before[0]
        assert model.count._version > before[1]


@torch.no_grad()
def test_a_default_device_is_no_matter() -> None:
    """Under `torch.device("meta")` a model on the CPU runs on the CPU: no tensor of the backend's own is made elsewhere."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Upsample(scale_factor=2), nn.ReLU())
            self.head = Convolutional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.pad(self.layers(x)[:, :3], (1, 1), value=0.5)
            result: torch.Tensor = self.head(y + torch.full((), 2.0, device="cpu"))
            return result

    model, x = Model().eval(), torch.randn(2, 16, 12, 12)
    expected = model(x)
    compiled = torch.compile(model, backend="hybrid", options={"strict": True})
    with torch.device("meta"):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_error_on_the_way_is_the_users_own() -> None:
    """Eager's error about devices is raised, in later calls too, and the graph runs on."""

    class Choosing(nn.Module):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + (x.to("meta") if self.fails else x)

    model = Choosing()
    compiled = check(model, torch.randn(4))
    model.fails = True
    with pytest.raises(Exception, match="meta"):
        compiled(torch.randn(4))
    model.fails = False
    check(model, torch.randn(4))
