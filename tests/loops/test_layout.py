"""Layouts: every logical element has one place of its own, where PyTorch's tensor of that form has it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.loops.index import Index, as_index, var
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous, offset_of
from torch_hybrid_backend.sizes.size import evaluate, symbol


def _places(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """The offset of each element, in row-major order of their indices."""
    found = []
    for index in itertools.product(*map(range, shape)):
        offset = offset_of(layout, shape, tuple(map(as_index, index)))
        assert not offset.terms
        found.append(int(offset.const))
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_strided_elements_lie_where_torch_has_them(dims: list[tuple[int, int]]) -> None:
    """Offsets are those of the tensor with these strides, the span is what it takes, also for strides of 0 and without dimensions."""
    shape, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    layout = Strided(strides)
    size = torch.empty_strided(shape, strides).untyped_storage().size() // 4
    assert layout.span(shape) == size
    storage = torch.arange(size)
    assert _places(layout, shape) == storage.as_strided(shape, strides).flatten().tolist()


@pytest.mark.parametrize("shape", [(2, 5, 3, 2), (1, 8, 4), (3, 4, 1, 1), (2, 1, 3), (2, 7)])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_blocks_of_channels_lie_innermost(shape: tuple[int, ...], block: int) -> None:
    """Elements lie as padding the channels, splitting off blocks and moving these last leaves them; the padding counts in the span."""
    layout = Blocked(block)
    blocks = -(-shape[1] // block)
    physical = torch.arange(layout.span(shape)).reshape(shape[0], blocks, *shape[2:], block)
    logical = physical.movedim(-1, 2).flatten(1, 2)[:, : shape[1]]
    assert layout.physical_shape(shape) == tuple(physical.shape)
    assert _places(layout, shape) == logical.flatten().tolist()


def test_contiguous_is_row_major() -> None:
    """Contiguous is row-major for any rank, none included."""
    for shape in ((2, 3, 4), (5,), (), (2, 1, 3)):
        assert _places(contiguous(shape), shape) == list(range(torch.Size(shape).numel()))


def test_offsets_of_loop_variables_stay_in_the_span() -> None:
    """The bound of an access is known before it runs: the greatest offset of a whole domain is the last element of the span."""
    shape = (3, 10, 5)
    domain: tuple[Index, ...] = tuple(var(f"i{d}", n) for d, n in enumerate(shape))
    for layout in (contiguous(shape), Strided((1, 3, 40)), Blocked(5), Blocked(2)):
        offset = offset_of(layout, shape, domain)
        assert (offset.low, offset.high) == (0, layout.span(shape) - 1)


def test_symbolic_shapes() -> None:
    """With sizes known only at run time, spans have the values that numbers would give."""
    channels, side = symbol("c"), symbol("n")
    values = {"c": 13, "n": 6}
    for layout in (Blocked(8), contiguous((2, channels, side))):
        concrete = layout if isinstance(layout, Blocked) else contiguous((2, 13, 6))
        assert evaluate(layout.span((2, channels, side)), values) == concrete.span((2, 13, 6))
