"""Graphs whose run in eager does not go as it was traced: other strides, operators that refuse, no memory. The user meets none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

LOGGER = "torch_hybrid_backend"
# Group norm stays whole, as the engine wants it, but no region is large enough for the engine.
IN_EAGER = {"min_region_nodes": 1000}


class Decoder(nn.Module):
    """Attention over the pixels of an image as a VAE's decoder has it: its result is viewed as an image again and normalised by groups.

    For a batch of one, `view` gives the image another stride of the batch dimension than the trace has: group norm refuses it in eager.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        pixels = self.project(x.view(batch, channels, -1).transpose(1, 2))
        image = pixels.transpose(-1, -2).reshape(batch, channels, height, width)
        return self.norm((image + x) / 2.0)


def _same(fast: object, model: object, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("options", [{}, IN_EAGER])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_with_another_stride_of_a_dimension_of_size_one(options: dict[str, Any], dynamic: bool) -> None:
    """The image that a view makes of transposed pixels, for a batch of one: right in eager as with an engine, at several sizes."""
    model = Decoder().eval()
    fast = torch.compile(model, backend="hybrid", dynamic=dynamic, options=options)
    with torch.no_grad():
        for size in (8, 8, 12, 6) if dynamic else (8, 8):
            _same(fast, model, torch.randn(1, 16, size, size))


@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("placement", ["measure", "estimate"])
def test_such_a_view_in_each_way_of_choosing(verify: str, placement: str) -> None:
    """A view with other strides is right where eager is run to compare with, to be timed, and in every call."""
    model = Decoder().eval()
    fast = torch.compile(model, backend="hybrid", options={"verify": verify, "placement": placement})
    x = torch.randn(1, 16, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            _same(fast, model, x)


def test_such_a_view_in_training() -> None:
    """Forward and backward graphs."""
    model = Decoder()
    fast = torch.compile(model, backend="hybrid")
    x = torch.randn(1, 16, 8, 8)
    for _ in range(2):
        gradients = []
        for run in (fast, model):
            model.zero_grad()
            run(x).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_such_a_view_in_a_branch() -> None:
    """The bodies of control flow run as graphs do."""
    model = Decoder().eval()

    def decoded(x: torch.Tensor) -> torch.Tensor:
        return model(x).contiguous()

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, decoded, torch.relu, (x,))

    fast = torch.compile(program, backend="hybrid", options=IN_EAGER)
    with torch.no_grad():
        for x in (torch.ones(1, 16, 8, 8), -torch.ones(1, 16, 8, 8)):
            _same(fast, program, x)


def test_a_table_of_parameters_alone() -> None:
    """A table of parameters alone is folded once for all calls, and again when a parameter changed."""
    model = Decoder().eval()
    image = nn.Parameter(torch.randn(1, 16, 8, 8))

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.image = model, image

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.model(self.image)

    offset, x = Offset().eval(), torch.randn(2, 16, 8, 8)
    fast = torch.compile(offset, backend="hybrid")
    with torch.no_grad():
        for _ in range(2):
            _same(fast, offset, x)
            image.mul_(2.0)


class NormalisedGradient(torch.autograd.Function):
    """A copy, whose gradient is normalised by groups."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.group_norm(gradient, 4)


def test_tangents_with_other_strides_in_each_call() -> None:
    """A gradient that comes in has its maker's strides in dimensions of size 1: in the first call as traced, in later ones not."""

    def model(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = NormalisedGradient.apply(x)
        return result

    fast = torch.compile(model, backend="hybrid", dynamic=True, options=IN_EAGER)
    for size, batch_stride in ((8, 1024), (8, 16), (6, 7)):
        x = torch.randn(1, 16, size, size).to(memory_format=torch.channels_last).requires_grad_()
        memory = torch.randn(1, 16, size, size)
        tangent = memory.as_strided(memory.shape, (batch_stride, 1, 16 * size, 16))
        (found,) = torch.autograd.grad(fast(x), x, tangent)
        torch.testing.assert_close(found, functional.group_norm(tangent.contiguous(), 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, IN_EAGER])
def test_an_operator_that_eager_has_no_kernel_for(options: dict[str, Any]) -> None:
    """Integers enlarged: the trace takes them, eager's kernel does not. An engine runs them, or eager by the operator's decomposition."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x + 1, scale_factor=2) * 2

    x = torch.arange(24).reshape(1, 2, 3, 4)
    with pytest.raises(NotImplementedError):
        model(x)
    fast = torch.compile(model, backend="hybrid", options=options)
    for _ in range(2):
        assert torch.equal(fast(x), (x + 1).repeat_interleave(2, 2).repeat_interleave(2, 3) * 2)


@pytest.mark.parametrize("options", [{}, IN_EAGER])
@pytest.mark.parametrize("index", [9, -1])
def test_an_index_out_of_range_is_the_users(options: dict[str, Any], index: int) -> None:
    """In the first call and in later ones, whoever runs the region, the user sees eager's own error."""
    table = torch.randn(4, 3)

    def model(i: torch.Tensor) -> torch.Tensor:
        return functional.embedding(i, table).sin() * 2

    with pytest.raises(IndexError) as expected:
        model(torch.tensor([1, index]))
    fast = torch.compile(model, backend="hybrid", options=options)
    with pytest.raises(IndexError) as found:
        fast(torch.tensor([1, index]))
    assert str(found.value) == str(expected.value)
    torch.testing.assert_close(fast(torch.tensor([1, 2])), model(torch.tensor([1, 2])))


def test_an_assertion_is_the_users() -> None:
    """An assertion that fails in a call raises in that call, and in no other."""

    def model(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0, "the sum must be positive")
        return x.sin() * 2

    fast = torch.compile(model, backend="hybrid")
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3)):
        if x.sum() > 0:
            torch.testing.assert_close(fast(x), model(x))
        else:
            with pytest.raises(RuntimeError, match="the sum must be positive"):
                fast(x)
