"""Choices of a generator: hypothesis, which shrinks them, or a seeded generator, which is fast and has no limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

Item = TypeVar("Item")


class Draw:
    """Choices, each made of one integer within bounds."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer  # both bounds included

    @staticmethod
    def seeded(seed: int) -> Draw:
        return Draw(random.Random(seed).randint)

    @staticmethod
    def hypothesis(draw: st.DrawFn) -> Draw:
        return Draw(lambda low, high: draw(st.integers(low, high)))

    def choose(self, items: Sequence[Item]) -> Item:
        return items[self.integer(0, len(items) - 1)]

    def chance(self, one_in: int) -> bool:
        return self.integer(1, one_in) == one_in

    def some(self, items: Sequence[Item], one_in: int) -> list[Item]:
        return [item for item in items if self.chance(one_in)]
