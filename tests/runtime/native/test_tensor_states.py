"""Tensors read in C++: the same answers as Python's, or none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.runtime.constants import LiveConstants
from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.runtime.native.tensor_states import snapshot


class Labelled(torch.Tensor):
    """A subclass that overrides nothing."""


def same(tensor: torch.Tensor, guarded: bool = True) -> Callable[[list[Any]], bool] | None:
    return snapshot([tensor], [0], frozenset([0] if guarded else []))


@pytest.mark.parametrize("kind", [lambda t: t, lambda t: torch.nn.Parameter(t, requires_grad=False)])
def test_memory_and_version_are_compared(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A write in place and other memory are seen; nothing done, or the same tensor in another object, is the same."""
    tensor = kind(torch.zeros(4, 3))
    is_same = same(tensor)
    assert is_same is not None
    assert is_same([tensor])
    assert is_same([tensor.detach()])
    assert not is_same([tensor.clone()])
    assert not is_same([tensor[1:]])
    tensor.add_(1)
    assert not is_same([tensor])
    is_same = same(tensor)
    assert is_same is not None
    tensor.data = torch.zeros(4, 3)
    assert not is_same([tensor])


def test_versions_count_only_where_asked() -> None:
    """A tensor that is not guarded may be written to, not moved."""
    tensor = torch.zeros(3)
    is_same = same(tensor, guarded=False)
    assert is_same is not None
    tensor.add_(1)
    assert is_same([tensor])
    assert not is_same([torch.zeros(3)])


@pytest.mark.parametrize("size", [(), (0,), (1,), (3, 0, 2), (2, 3)])
def test_every_position_is_compared(size: tuple[int, ...]) -> None:
    """Tensors of any size, among other inputs; the first, one between and the last are all looked at."""
    inputs: list[Any] = [torch.zeros(size) if index != 2 else 7 for index in range(5)]
    is_same = snapshot(inputs, [0, 1, 3, 4], frozenset([0, 1, 3, 4]))
    assert is_same is not None
    assert is_same([*inputs, "one more"])
    for position in (0, 1, 3, 4):
        before = inputs[position].clone()
        inputs[position].zero_()
        assert not is_same(inputs)
        inputs[position] = before
        is_same = snapshot(inputs, [0, 1, 3, 4], frozenset([0, 1, 3, 4]))
        assert is_same is not None


def test_what_cannot_be_told_is_left_to_python() -> None:
    """Subclasses, what is no tensor, no list and tensors that count no versions: no snapshot, and never the same."""
    tensor = torch.zeros(3)
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    with FakeTensorMode():
        fake = torch.zeros(3)
    assert snapshot((tensor,), [0], frozenset([0])) is None
    assert same(tensor.as_subclass(Labelled)) is None
    assert same(fake) is None
    assert same(uncounted) is None
    assert same(uncounted, guarded=False) is not None
    is_same = same(tensor)
    assert is_same is not None
    for other in ((tensor,), [], [None], [3], [tensor.as_subclass(Labelled)], [fake], [uncounted]):
        assert not is_same(other)  # type: ignore[arg-type]


def test_no_positions_are_always_the_same() -> None:
    """A graph without constants has nothing that changes."""
    is_same = snapshot([torch.ones(1)], [], frozenset())
    assert is_same is not None
    assert is_same([torch.ones(2)])


def test_wrong_arguments_raise() -> None:
    """Positions outside of the list, and calls that no caller here makes, are errors, not crashes."""
    with pytest.raises(IndexError, match="no such position"):
        snapshot([torch.ones(1)], [1], frozenset())
    with pytest.raises(IndexError, match="no such position"):
        snapshot([torch.ones(1)], [-2], frozenset())
    module = native_module()
    assert module is not None
    with pytest.raises(ValueError, match="a byte"):
        module.snapshot([torch.ones(1)], (0,), b"")
    with pytest.raises(TypeError, match="a snapshot and a list"):
        module.unchanged()
    with pytest.raises(ValueError, match="PyCapsule"):
        module.unchanged(object(), [])


def test_no_tensor_is_kept_alive() -> None:
    """Tensors that were made die with their parameters, which a snapshot does not hold."""
    weight = torch.nn.Parameter(torch.randn(4))
    constants: LiveConstants[torch.Tensor] = LiveConstants([0], [0], lambda inputs, _: inputs[0].detach() * 2)
    made, storage = weakref.ref(constants.get([weight])), weakref.ref(weight.untyped_storage())
    assert constants.get([weight]) is made()
    del weight
    gc.collect()
    assert storage() is None
    assert made() is None
