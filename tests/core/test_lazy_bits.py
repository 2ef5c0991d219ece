"""Lazy bits: the memory stays, or the numbers do."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.core.lazy_bits import LazyBits, copied

BITS = [LazyBits(conjugate, negative) for conjugate in (False, True) for negative in (False, True)]


@pytest.mark.parametrize("wanted", BITS, ids=str)
@pytest.mark.parametrize("given", BITS, ids=str)
def test_views_and_copies(given: LazyBits, wanted: LazyBits) -> None:
    """A view has the memory, a copy the numbers, strides and no memory in common."""
    memory = torch.randn(5, 6, dtype=torch.complex64).t()[1:]
    tensor = given.view_of(memory)
    assert LazyBits.of(tensor) == given
    assert bool(given) == (given != LazyBits())
    assert [bits.are_of(tensor) for bits in BITS] == [bits == given for bits in BITS]
    view, copy = wanted.view_of(tensor), wanted.copy_of(tensor)
    assert (view.data_ptr(), view.stride()) == (memory.data_ptr(), memory.stride())
    assert LazyBits.of(view) == LazyBits.of(copy) == wanted
    assert torch.equal(LazyBits().view_of(view), memory)
    assert torch.equal(copy, tensor)
    assert copy.stride() == torch.empty_like(memory).stride()
    assert copy.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
    assert LazyBits.of(copied(tensor)) == given


def test_real_numbers_can_be_negated() -> None:
    """The imaginary part of a conjugate is a negated view of real numbers."""
    x = torch.randn(3, dtype=torch.complex64).conj().imag
    assert LazyBits.of(x) == LazyBits(negative=True)
    assert torch.equal(LazyBits().copy_of(x), x)
