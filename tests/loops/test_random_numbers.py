"""Numbers that a random operator takes of its device's generator, and which place of it an element is told."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.loops.index import var
from torch_hybrid_backend.loops.ir import Call, Const, FromIndex, Load
from torch_hybrid_backend.loops.random_numbers import Generator
from torch_hybrid_backend.sizes.size import evaluate, symbol


@pytest.mark.parametrize(("numel", "groups"), [(1, 1), (512, 1), (2048, 1), (2049, 2), (20_000, 10)])
def test_the_generator_advances_as_eager_does(numel: int, groups: int) -> None:
    """By one group for each turn of four elements of all threads, whatever the vectors, or of two in float64; also where the size is known only
    at run time."""
    generator = Generator()
    draws = [generator.draw(numel, 2), generator.draw(numel, 2, vector=8), generator.draw(symbol("n"), 2)]
    assert generator.draws == draws
    assert [evaluate(draw.groups, {"n": numel}) for draw in draws] == [groups] * 3
    assert generator.draw(numel, 2, per_group=2).groups == (numel - 1) // (2 * min(512, -(-numel // 256) * 256)) + 1
    assert len(set(generator.buffers)) == 5


def test_equal_operators_have_equal_kernels() -> None:
    """An element is its position; what was taken before it is a buffer of its own."""
    generator = Generator(by_value=True)
    i = var("i", 5000)
    first, second = (generator.draw(5000, 2).at("random_uniform", "float32", i) for _ in range(2))
    assert isinstance(first, Call)
    assert isinstance(second, Call)
    seed, counter, position, *numbers = first.args
    assert isinstance(seed, Load)
    assert isinstance(counter, Load)
    assert counter.buffer.by_value
    assert counter.buffer is not second.args[1].buffer  # type: ignore[attr-defined]
    assert isinstance(position, Call)
    assert isinstance(position.args[0], FromIndex)
    assert (position.dtype, position.args[0].index) == ("int32", i)
    assert [number.value for number in numbers if isinstance(number, Const)] == [512, 1, 4]


def test_many_elements_are_counted_in_64_bits() -> None:
    """From 2^31 on."""
    i = var("i", 1 << 31)
    e = Generator().draw(1 << 31, 2, vector=8).at("random_uniform", "float32", i)
    assert isinstance(e, Call)
    assert [argument.dtype for argument in e.args] == ["int64"] * 6
