"""Laying out a static graph: which graphs can be, what each call passes, and when two specs address the same memory.

Here the segments are callbacks; programs of kernels, and where their buffers come to lie, are tested through the executor (test_executor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.runtime.plan_layout import Piece, StaticLayout, StaticLayoutError, lay_out, same_memory
from torch_hybrid_backend.sizes.size import symbol

SQUARE = TensorSpec((8, 8), "float32", (8, 1), CPU)
TRANSPOSED = TensorSpec((8, 8), "float32", (1, 8), CPU)


def _callback(inputs: str, outputs: str, spec: TensorSpec | None = SQUARE) -> Piece:
    """A segment that reads and writes values of one spec; names are separated by spaces."""
    reads, writes = tuple(inputs.split()), tuple(outputs.split())
    return Piece(reads, (spec,) * len(reads), writes, (spec,) * len(writes), None)


def _lay_out(pieces: Sequence[Piece], outputs: str, inputs: str = "x y w", constants: str = "w") -> StaticLayout:
    return lay_out(frozenset(inputs.split()), frozenset(constants.split()), pieces, outputs.split())


def test_only_inputs_that_are_read_are_passed() -> None:
    """Each once, in the order of first use, constants that callbacks read among them; what nobody reads is no part of a call."""
    layout = _lay_out([_callback("w x", "a"), _callback("x a", "b")], "b")
    assert layout.inputs == ("w", "x")
    assert layout.slots == ()
    assert len(layout.steps) == 2


def test_values_that_callbacks_make_take_no_planned_memory() -> None:
    """They are tensors of their own in each call: nothing lies in the arena, and one value has one place for all its readers."""
    layout = _lay_out([_callback("x", "a b"), _callback("a", "c"), _callback("a b c", "d")], "d a d")
    assert layout.arena_bytes == 0
    assert len(layout.values) == 5  # x, a, b, c and d
    d, a, again = layout.outputs
    assert d == again != a
    assert [layout.values[number].spec for number in (d, a)] == [SQUARE, SQUARE]


def test_an_input_read_in_two_forms_is_two_values_of_one_input() -> None:
    """Segments may have been built for other strides of the same input: it is passed once."""
    layout = _lay_out([_callback("x", "a"), _callback("x", "b", TRANSPOSED)], "a b")
    assert layout.inputs == ("x",)
    assert [layout.values[number].spec for number in layout.outputs] == [SQUARE, TRANSPOSED]
    assert len(layout.values) == 4


SIZE = symbol("s0")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "no tensor"),
        (TensorSpec((SIZE, 8), "float32", (8, 1), CPU), "only at run time"),
        (TensorSpec((8, 8), "float32", (SIZE, 1), CPU), "only at run time"),
    ],
    ids=["number", "size", "stride"],
)
@pytest.mark.parametrize("place", ["input", "output"])
def test_what_is_only_known_at_run_time_is_named(spec: TensorSpec | None, message: str, place: str) -> None:
    """Neither a value without a spec nor one of symbolic sizes or strides can be laid out ahead of the call."""
    inputs, outputs = ((spec,), (SQUARE,)) if place == "input" else ((SQUARE,), (spec,))
    with pytest.raises(StaticLayoutError, match=f"^{'x' if place == 'input' else 'a'} .*{message}"):
        _lay_out([Piece(("x",), inputs, ("a",), outputs, None)], "a")


_forms = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3)


def _elements(spec: TensorSpec) -> list[int]:
    """The storage offsets that a tensor of the spec addresses, in row-major order."""
    return torch.arange(spec.span).as_strided(spec.shape, spec.strides).flatten().tolist()  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_forms, st.data())
def test_same_memory_is_the_same_elements(form: list[tuple[int, int]], data: st.DataObject) -> None:
    """Two specs of one shape address the same memory exactly where their elements lie at the same places: strides of dimensions of
    size 1 do not count, all others do."""
    shape = tuple(n for n, _ in form)
    first = TensorSpec(shape, "float32", tuple(stride for _, stride in form), CPU)
    others = [data.draw(st.sampled_from([stride, stride + 1, 0])) for _, stride in form]
    second = TensorSpec(shape, "float32", tuple(others), CPU)
    assert same_memory(first, second) == (_elements(first) == _elements(second))


def test_another_form_is_other_memory() -> None:
    """Another dtype or another shape, be it of the same elements, is not the same."""
    assert same_memory(SQUARE, SQUARE)
    assert not same_memory(SQUARE, TRANSPOSED)
    assert not same_memory(SQUARE, TensorSpec((8, 8), "int32", (8, 1), CPU))
    assert not same_memory(SQUARE, TensorSpec((64,), "float32", (1,), CPU))
    assert not same_memory(SQUARE, TensorSpec((8, 8, 1), "float32", (8, 1, 1), CPU))
