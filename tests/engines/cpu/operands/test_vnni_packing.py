"""Packing of operands of dot products in words."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.engines.cpu.dot_products import MULTIPLICATION, DotProduct
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import (
    channel_sums,
    column_sums,
    constant_words,
    image_words,
    left_words,
    pack_conv_words,
    pack_right,
    pack_taps,
    packed_conv_words_value,
    packed_right_value,
)
from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, Load, Map

VPDPBUSD = DotProduct("vpdpbusd", 4, "uint8", "int8", "int32", 128)
VPMADDWD = DotProduct("vpmaddwd", 2, "int16", "int16", "int32")


def evaluated(e: Expr, tensors: dict[Buffer, torch.Tensor]) -> int:
    """An expression of constants, loads and casts, as packings are."""
    match e:
        case Const():
            return int(e.value)
        case Load():
            return int(tensors[e.buffer][tuple(int(i.const) for i in e.index)])
        case Call(_, "guard", (Const() as condition, inside, outside)):
            return evaluated(inside if condition.value else outside, tensors)
        case Call(_, "and", args):
            return int(all(evaluated(a, tensors) for a in args))
        case Call(_, "guard", (condition, inside, outside)):
            return evaluated(inside if evaluated(condition, tensors) else outside, tensors)
        case Call(_, "add", (a, b)):
            return evaluated(a, tensors) + evaluated(b, tensors)
        case Call(_, "cast", (a,)):
            return evaluated(a, tensors)
    raise AssertionError(e)


def tensor_of(value: Map, source: Buffer, tensor: torch.Tensor) -> torch.Tensor:
    """A value's elements, one by one."""
    shape = tuple(int(n) for n in value.shape)  # type: ignore[call-overload]
    found = torch.empty(shape, dtype=torch.int64)
    for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        found[tuple(place)] = evaluated(value.at(tuple(map(as_index, place))), {source: tensor})
    return found


@pytest.mark.parametrize("dot", [VPDPBUSD, VPMADDWD, MULTIPLICATION])
def test_operands_lie_in_words(dot: DotProduct) -> None:
    """Ahead of calls and in every call alike; and their product, with what columns start at, is that of the operands."""
    torch.manual_seed(0)
    a = torch.randint(-128, 128, (2, 3, 7), dtype=torch.int8)
    b = torch.randint(-128, 128, (2, 7, 5), dtype=torch.int8)
    left, right = constant_words(a, dot), pack_right(b, 4, dot)
    source = Buffer((2, 3, 7), "int8")
    assert torch.equal(tensor_of(left_words(source, dot), source, a), left.long())
    source = Buffer((2, 7, 5), "int8")
    assert torch.equal(tensor_of(packed_right_value(source, 4, dot), source, b), right.long())
    words = left.reshape(2, 3, -1, dot.group).long()
    sums = torch.einsum("bmkg,bpkng->bmpn", words, right.long()).flatten(2)
    sums += column_sums(b, 4, -dot.shift).long()[:, None]
    assert torch.equal(sums[:, :, :5], a.long() @ b.long())


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_of_convolutions_lie_in_words(groups: int) -> None:
    """Weights of convolutions lie as `pack_conv_weight` has them, a word of input channels in the place of a channel; in every call alike."""
    torch.manual_seed(0)
    w = torch.randint(-128, 128, (6, 6, 1, 2), dtype=torch.int8)
    packed = pack_conv_words(w, groups, 2, VPDPBUSD)
    source = Buffer((6, 6, 1, 2), "int8")
    assert packed.shape == (groups, 3 // groups + (groups == 2), 1, 2, 2, 2, 4)
    assert torch.equal(tensor_of(packed_conv_words_value(source, groups, 2, VPDPBUSD), source, w), packed.long())
    assert packed[0, 0, 0, 1, 1, 1, 0] == w[1, 4, 0, 1]
    assert not packed[0, 0, 0, 1, :, :, 2:].any()
    sums = channel_sums(w, groups, 2, -3).reshape(groups, -1)
    assert torch.equal(sums[:, : 6 // groups].flatten().long(), -3 * w.long().sum((1, 2, 3)))


def test_images_lie_in_words() -> None:
    """Moved, with zeros in the place of channels that are missing."""
    x = torch.arange(-6, 6, dtype=torch.int8).reshape(1, 3, 2, 2)
    source = Buffer((1, 3, 2, 2), "int8")
    found = tensor_of(image_words(source, VPDPBUSD), source, x)
    assert torch.equal(found, torch.nn.functional.pad(x.long() + 128, (0, 0, 0, 0, 0, 1)))


@pytest.mark.parametrize("kernel", [(3, 3), (5,), (2, 8)])
def test_taps_of_a_line_lie_in_words(kernel: tuple[int, ...]) -> None:
    """Neighbours along the last dimension, innermost; what is beyond the last tap and the last channel is 0."""
    w = torch.randint(-128, 128, (20, 1, *kernel)).to(torch.int8)
    packed = pack_taps(w, 16)
    height, width = (1, *kernel)[-2:]
    assert packed.shape == (2, height, -(-width // 4), 16, 4)
    lines = packed.permute(0, 3, 1, 2, 4).reshape(32, height, -1)
    assert torch.equal(lines[:20, :, :width], w.reshape(20, height, width))
    assert not lines[20:].any()
    assert not lines[:, :, width:].any()
