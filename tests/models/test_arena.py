"""The memory between the kernels of real models is as small as the lifetimes in their plans allow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.models import ZOO
from torch_hybrid_backend.driver import stages
from torch_hybrid_backend.runtime.executor import Executor, build_executor
from torch_hybrid_backend.runtime.memory import ALIGNMENT
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.plan_layout import PlanLayout


def _most_alive(layout: PlanLayout) -> int:
    """Bytes of the arena's values, each rounded up to ALIGNMENT, at the step with the most between first and last use."""
    uses: dict[int, list[int]] = {}
    for step, planned in enumerate(layout.steps):
        for number in planned.step.memory:
            value = layout.values[number]
            root = value.payload if value.kind is ValueKind.ALIAS else number
            if layout.values[root].kind is ValueKind.ARENA:
                uses.setdefault(root, []).append(step)
    alive: Counter[int] = Counter()
    for root, steps in uses.items():
        size = -(-layout.values[root].spec.size_bytes // ALIGNMENT) * ALIGNMENT
        alive.update(dict.fromkeys(range(min(steps), max(steps) + 1), size))
    return max(alive.values())


# Lifetimes along a chain, and across it: U-Net's skips. Where values are placed is tested by tests/runtime/test_memory.py.
_QUICK = ("bert_base", "unet")


@pytest.mark.parametrize(
    "name",
    [*_QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in ("resnet50", "swin_tiny", "lstm"))],
)
def test_the_arena_is_the_minimum_for_the_lifetimes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is no larger than what is alive at one step of the plan, which no placement can go below."""
    built: list[Executor] = []

    def record(*arguments: Any, **named: Any) -> Executor:
        built.append(build_executor(*arguments, **named))
        return built[-1]

    monkeypatch.setattr(stages, "build_executor", record)
    with torch.no_grad():
        torch.compile(ZOO[name].build("small"), backend="hybrid")(*ZOO[name].inputs("small", batch=8))
    arenas = [executor.layout for executor in built if executor.layout.arena_bytes]
    assert arenas
    for layout in arenas:
        assert layout.arena_bytes == _most_alive(layout)
