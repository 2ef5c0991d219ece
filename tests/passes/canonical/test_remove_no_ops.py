"""Operators that change nothing go; those that only look like it stay."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.remove_no_ops import remove_no_ops

aten = torch.ops.aten


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x.clone()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone().relu(),
        lambda x: aten._to_copy(x, dtype=torch.float32).relu(),
        lambda x: aten.view(x, [4, 6]).relu(),
        lambda x: aten.expand(x, [4, 6]).relu(),
        lambda x: aten.slice(x, 0, 0, 9223372036854775807).relu(),
        lambda x: aten.permute(x, [0, 1]).relu(),
        lambda x: x.t().t().relu(),
        lambda x: x.detach().relu(),
    ],
)
def test_removed(captured, function):
    """Operators that return their input are dropped."""
    subject = captured(function, torch.randn(4, 6))
    subject.apply(remove_no_ops, remove_no_ops, exact=True)
    assert subject.operators() == {"relu.default": 1}


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.t().contiguous().view(-1).relu(), "clone.default"),  # a layout change
        (lambda x: x.clone(), "clone.default"),  # keeps the output apart from the input
        (lambda x: twice(x.relu()), "clone.default"),  # keeps two outputs apart
        (lambda x: x.clone().t(), "clone.default"),  # as the first, through a view
        (lambda x: x.double().relu(), "_to_copy.default"),
        (lambda x: x[1:].relu(), "slice.Tensor"),
        (lambda x: x.t().relu(), "permute.default"),
        (lambda x: torch.tensor([1.0, 2.0]), "lift_fresh_copy.default"),  # fresh memory in every call
    ],
)
def test_kept(captured, function, kept):
    """Casts, layout changes and copies that somebody can tell from the original stay."""
    subject = captured(function, torch.randn(4, 6))
    subject.apply(remove_no_ops, exact=True)
    assert subject.operators()[kept] == 1


@pytest.mark.parametrize(
    ("dtypes", "left"),
    [
        ((torch.bfloat16, torch.float32, torch.bfloat16), 0),
        ((torch.float16, torch.float64, torch.float16), 0),
        ((torch.float32, torch.float64, torch.float32), 0),
        ((torch.float32, torch.bfloat16, torch.float32), 2),  # rounds
        ((torch.bfloat16, torch.float16, torch.bfloat16), 2),  # neither holds the other's values
        ((torch.float16, torch.float32, torch.bfloat16), 2),
        ((torch.int32, torch.float32, torch.int32), 2),  # 2**24 + 1
        ((torch.float32, torch.float8_e5m2, torch.float32), 2),
    ],
)
def test_casts_to_a_wider_dtype_and_back(captured, dtypes, left):
    """Casts cancel where not a bit can change, NaN, infinities and -0.0 included; and no others do."""
    before, between, after = dtypes
    x = torch.tensor([1.0, -0.0, 3.1415926, 65504.0, 1e-8])
    if before.is_floating_point:
        x = torch.cat((x, torch.tensor([float("nan"), float("inf"), -float("inf")])))
    subject = captured(lambda x: x.abs().to(between).to(after).abs(), x.to(before))
    subject.apply(remove_no_ops, dead_code, exact=True)
    assert subject.operators()["_to_copy.default"] == left


def test_copy_of_an_intermediate_goes_even_if_returned(captured):
    """A returned copy of a value nobody else returns can be that value."""
    subject = captured(lambda x: x.relu().clone(), torch.randn(4, 6))
    assert subject.apply(remove_no_ops, exact=True)
    assert subject.operators() == {"relu.default": 1}


def test_views_merge(captured):
    """Chains of views and of permutations become one each; an identity chain becomes none."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.view(2, 12).view(24).unsqueeze(0).relu(),
            x.view(2, 3, 4).permute(1, 2, 0).permute(2, 0, 1).sin(),
            x.view(2, 3, 4).permute(1, 2, 0).permute(1, 0, 2).cos(),
        )

    subject = captured(function, torch.randn(4, 6))
    assert subject.apply(remove_no_ops, remove_no_ops, exact=True)
    from torch_hybrid_backend.passes.canonical.dead_code import dead_code

    subject.apply(dead_code, exact=True)
    assert subject.operators()["permute.default"] == 1
    assert subject.operators()["view.default"] <= 3
    assert subject.operators()["unsqueeze.default"] == 0


def test_view_of_a_view_that_cannot_merge(captured):
    """Halves that are views of their own inputs but not of the first stay two."""
    subject = captured(lambda x: x.t().unsqueeze(0).squeeze(0).relu(), torch.randn(4, 6))
    subject.apply(remove_no_ops, exact=True)
    assert subject.operators()["relu.default"] == 1


def test_as_strided_reshape_becomes_view(captured):
    """as_strided that only reshapes is spelt view; one that strides is not."""
    subject = captured(
        lambda x: (torch.as_strided(x.sin(), (24,), (1,)).exp(), torch.as_strided(x.cos(), (2,), (3,)).exp()),
        torch.randn(4, 6),
    )
    assert subject.apply(remove_no_ops, exact=True)
    assert subject.operators()["view.default"] == 1
    assert subject.operators()["as_strided.default"] == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_joined(captured, dynamic, transposed):
    """Tensors without elements are not joined; a concatenation of one tensor is that tensor, or keeps the strides it had."""

    def rotated(x):
        y = x.cos().transpose(0, 1) if transposed else x.cos()
        return torch.cat([y, y[..., 6:]], -1) + 1, torch.cat([y[..., 6:], y, y.sin()], -1)

    subject = captured(rotated, torch.randn(4, 3, 6), dynamic=dynamic)
    # From torch 2.15 on the size of a slice of an unknown one is not looked at: it may have elements.
    assert subject.apply(remove_no_ops, exact=True) or dynamic
    nodes = subject.gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    sizes = [part.meta["val"].numel() for node in nodes for part in node.args[0]]
    assert sizes
    assert not any(isinstance(size, int) and size == 0 for size in sizes)


def test_one_tensor_joined_with_nothing_is_a_new_one(captured):
    """The result shares no memory with an input."""
    subject = captured(lambda x: torch.cat([x, x[:0]]), torch.randn(4, 6), dynamic=False)
    subject.apply(remove_no_ops, exact=True)
    (result,) = subject.run()
    assert result.data_ptr() != subject.inputs[0].data_ptr()


def test_padding_by_nothing_before_quantizing(captured):
    """Networks that compute their padding pad 1x1 convolutions by zeros of zero width; what is returned, or padded, is left alone."""
    pad, quantize = torch.nn.functional.pad, torch.ops.quantized_decomposed.quantize_per_tensor.default
    numbers = 0.1, 0, -128, 127, torch.int8
    subject = captured(lambda x: quantize(pad(x.sin(), (0, 0, 0, 0)), *numbers), torch.randn(4, 6))
    assert subject.apply(remove_no_ops, exact=True)
    assert "constant_pad_nd.default" not in subject.operators()
    for kept in (lambda x: pad(x, (0, 0)), lambda x: quantize(pad(x.sin(), (0, 1)), *numbers)):
        assert not captured(kept, torch.randn(4, 6)).apply(remove_no_ops, exact=True)
