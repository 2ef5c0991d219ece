"""Sums behind convolutions: which operands are quantized, and in whose range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend
from torch_hybrid_backend import quantize
from torch_hybrid_backend.engines.cpu.dot_products import integer_dot_product
from torch_hybrid_backend.engines.cpu.target import Target

DOT = integer_dot_product("uint8", "int8", Target.host(), knows_sums=True)


class Block(nn.Module):
    """Two blocks of a residual network: the shortcut of the first is a convolution, of the second the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.norm = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.shortcut, self.second = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = self.norm(self.first(x))
        y += self.shortcut(x)
        y = torch.relu(y)
        y = torch.relu(y + self.second(y))
        return self.last(y)


class Summed(nn.Module):
    """A convolution's result and `of` its input are added."""

    def __init__(self, of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.linear, self.of = nn.Conv2d(8, 8, 1), nn.Linear(6, 6), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self, x * 2)


def _padded(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + net.conv(functional.pad(input=x, pad=(0, 0, 0, 0)))


def _written_between(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    return y + x.mul_(2)


SUMS = {
    "behind": (lambda net, x: net.conv(x) + x, (None, "conv")),
    "before": (lambda net, x: torch.add(x, net.conv(x)), ("conv", None)),
    "padded": (_padded, ("conv", None)),
    "written": (_written_between, None),
    "scaled": (lambda net, x: torch.add(x, net.conv(x), alpha=2), None),
    "a number": (lambda net, x: net.conv(x) + 1, None),
    "broadcast": (lambda net, x: net.conv(x) + x.mean((2, 3), keepdim=True), None),
    "activated": (lambda net, x: functional.leaky_relu(net.conv(x), 0.1) + x, (None, "conv")),
    "activated in place": (lambda net, x: x + functional.silu(net.conv(x), inplace=True), ("conv", None)),
    "exponential": (lambda net, x: torch.exp(net.conv(x)) + x, None),
    "linear": (lambda net, x: net.linear(x) + x, None),
}


@pytest.fixture(scope="module")
def block() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Block().eval(), [torch.randn(2, 3, 6, 7) for _ in range(3)]


def test_operands_read_from_memory_are_quantized(block: tuple[nn.Module, list[torch.Tensor]]) -> None:
    """The first of two that convolutions make is quantized, in a range of its own; one that a convolution reads in that one's range."""
    model, data = block
    sites = quantize(model, data, "naive").ranges.sites
    made, added = sites["#add1"], sites["#add2"]
    assert (made.kind, added.kind) == ("add", "add")
    with torch.no_grad():
        largest = max(float(model.norm(model.first(torch.relu(model.stem(x)))).abs().max()) for x in data)
    assert made.ranges is not None
    assert made.ranges[1] is None
    assert max(map(abs, made.ranges[0] or ())) == pytest.approx(largest)
    assert added.ranges == (sites["second"].ranges[0], None)  # type: ignore[index]


@pytest.mark.parametrize("name", SUMS)
def test_other_sums_stay(name: str) -> None:
    """Operands are known by what they are, not by where they are added: not once they are written to, nor with other shapes or layers."""
    of, sources = SUMS[name]
    torch.manual_seed(0)
    x = torch.randn(1, 8, 6, 6)
    sites = quantize(Summed(of).eval(), [x], "naive").ranges.sites
    expected = sources and tuple(source and sites[source].ranges[0] for source in sources)  # type: ignore[index]
    assert (sites["#add1"].ranges if "#add1" in sites else None) == expected


def test_sums_that_are_left(block: tuple[nn.Module, list[torch.Tensor]]) -> None:
    """By kind, by name, and where scales are found in every call."""
    model, data = block
    kept = quantize(model, data, "naive", exclude_kinds=("add", "matmul")).ranges
    assert not any("#add" in name for name in kept.sites)
    assert kept.in_float == {"#add1": "excluded", "#add2": "excluded"}
    assert not any("#add" in name for name in quantize(model, data, "none").ranges.sites)
    assert sorted(quantize(model, data, "entropy").ranges.sites)[:2] == ["#add1", "#add2"]
    net = nn.Sequential(model).eval()
    assert "0#add1" in quantize(net, data, "naive", exclude=("0.second",)).ranges.sites


def test_compiled_sums_equal_eager(block: tuple[nn.Module, list[torch.Tensor]]) -> None:
    """Also where a sum is written over its first operand; in eager the sums have a step's error, not more."""
    model, data = block
    quantized = quantize(model, data, "naive")
    floats = quantize(model, data, "naive", exclude_kinds=("add", "matmul"))
    with torch.no_grad():
        eager = quantized(data[0])
        assert 0 < float((eager - floats(data[0])).norm() / eager.norm()) < 0.02
        torch._dynamo.reset()
        compiled = torch.compile(quantized, backend="hybrid", fullgraph=True)
        for x in data:
            assert float((compiled(x) - quantized(x)).norm() / eager.norm()) < 2e-3


@pytest.mark.skipif(not DOT, reason="without dot products integers are widened by kernels of their own")
def test_no_float_lies_between_quantized_blocks(block: tuple[nn.Module, list[torch.Tensor]]) -> None:
    """Sums are in the convolutions' kernels: one for each convolution, behind two that quantize the image and copy its words."""
    model, data = block
    torch._dynamo.reset()
    with torch.no_grad():
        quantized = quantize(model, data, "naive")
        report = torch_hybrid_backend.explain(quantized, data[0])
    kernels = [kernel for graph in report.plans for region in graph.regions for kernel in region.kernels]
    kinds = [name.split("_")[0].replace("tile", "packed") for name in kernels]  # AMX's, where the processor has it
    assert kinds == ["map", "map", *["packed"] * 5], kernels


def kernels_like_eager(quantized: nn.Module, x: torch.Tensor) -> list[str]:
    """The kernels of a quantized module, whose result is eager's."""
    torch._dynamo.reset()
    with torch.no_grad():
        eager = quantized(x)
        compiled = torch.compile(quantized, backend="hybrid", fullgraph=True)
        assert float((compiled(x) - eager).norm() / eager.norm()) < 2e-3
        report = torch_hybrid_backend.explain(quantized, x)
    return [kernel for graph in report.plans for region in graph.regions for kernel in region.kernels]


class Activated(nn.Module):
    """Darknet's blocks: an activation stands between the batch norm and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(self._layer(32, 16, 1), self._layer(16, 32, 3)) for _ in range(2))

    def _layer(self, inputs: int, outputs: int, size: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1, inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def test_sums_behind_activations() -> None:
    """Kernels read integers, and nothing between the blocks is written in float32: one kernel for each convolution. The result is eager's."""
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 9, 8) for _ in range(2)]
    quantized = quantize(Activated().eval(), data, "naive")
    sites = quantized.ranges.sites
    assert sites["#add1"].ranges == (sites["blocks.0.0.0"].ranges[0], None)  # type: ignore[index]
    assert sites["#add2"].ranges == (sites["blocks.1.0.0"].ranges[0], None)  # type: ignore[index]
    kernels = kernels_like_eager(quantized, data[0])
    if DOT:
        assert sum("conv" in kernel and "round_even" in kernel for kernel in kernels) == 5, kernels


class Branches(nn.Module):
    """Inception's: convolutions and poolings read one concatenation, `order` says which first."""

    def __init__(self, order: str = "conv pool") -> None:
        super().__init__()
        self.order = order
        self.left, self.right = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 3, padding=1)
        self.own, self.behind = nn.Conv2d(48, 16, 1), nn.Conv2d(48, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(torch.cat([self.left(x), self.right(x), self.left(x * 2)], 1))
        made = {}
        for part in self.order.split():
            if part == "write":
                y.mul_(0.5)
            else:
                made[part] = self.own(y) if part == "conv" else functional.avg_pool2d(y, 3, stride=1, padding=1)
        return torch.cat([made["conv"], self.behind(made["pool"])], 1)


def test_a_pooling_reads_what_convolutions_read() -> None:
    """In their range. Not what nobody else quantizes, what was written to since, what is excluded, nor without calibration."""
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 9, 8) for _ in range(2)]
    model = Branches().eval()
    ranges = quantize(model, data, "naive").ranges
    assert ranges.sites["#pool1"].kind == "pool"
    assert ranges.sites["#pool1"].ranges == ranges.sites["own"].ranges
    assert "#pool1" not in quantize(model, data, "none").ranges.sites
    assert "#pool1" not in quantize(Branches("pool conv").eval(), data, "naive").ranges.sites
    assert "#pool1" not in quantize(Branches("conv write pool").eval(), data, "naive").ranges.sites
    excluded = quantize(model, data, "naive", exclude_kinds=("matmul", "pool")).ranges
    assert excluded.in_float["#pool1"] == "excluded"
    assert "#pool1" not in excluded.sites


@pytest.mark.skipif(not DOT, reason="without dot products integers are widened by kernels of their own")
def test_branches_are_joined_in_integers() -> None:
    """Every convolution before the concatenation writes integers, and the result is eager's."""
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 9, 8) for _ in range(2)]
    quantized = quantize(Branches().eval(), data, "naive")
    kernels = kernels_like_eager(quantized, data[0])
    assert sum("conv" in kernel and "round_even" in kernel for kernel in kernels) == 3, kernels
