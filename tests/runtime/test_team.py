"""Kernels that follow one another share one parallel region (csrc/include/team.h)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.plans import Draft
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.native.ops import Binding, Guard

N = 4096  # as in conftest.py


@pytest.fixture
def thread_count() -> Iterator[None]:
    """Gives PyTorch back the threads it had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def value(draft: Draft, kind: ValueKind, payload: int = 0, elements: int = N) -> int:
    return draft.add_value(kind, payload, torch.float32, [elements], [1])


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 70])
def test_every_task_of_every_loop_runs_once(kernels: str, threads: int) -> None:
    """Thirty kernels in place, each reading what the last wrote; also with more threads than cores, and than a team hands out at once."""
    torch.set_num_threads(threads)
    draft = Draft()
    x = value(draft, ValueKind.INPUT)
    sums = [value(draft, ValueKind.ARENA, 4 * N * (i % 2)) for i in range(2)]
    out = value(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "double", [x, sums[0]])
    for i in range(28):
        draft.add_kernel(kernels, "add", [sums[i % 2], x, sums[(i + 1) % 2]])
    draft.add_kernel(kernels, "scratch", [sums[0], out])
    plan = draft.seal(1, 0, 8 * N, [out])
    binding = Binding(plan, Guard([]), {}, {})
    given = torch.arange(N, dtype=torch.float32)
    for _ in range(5):
        [result] = plan.run(binding, [given]) or []
        assert torch.equal(result, 30 * given + 1)


def test_a_kernel_that_fails_among_others_is_named(kernels: str) -> None:
    """Its error leaves the shared region as it is; the region ends, and later calls have one of their own."""
    draft = Draft()
    x, doubled = value(draft, ValueKind.INPUT), value(draft, ValueKind.ARENA)
    starved, out = value(draft, ValueKind.FRESH), value(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "double", [x, doubled])
    draft.add_kernel(kernels, "starve", [doubled, starved])
    draft.add_kernel(kernels, "double", [doubled, out])
    plan = draft.seal(1, 0, 4 * N, [out, starved])
    binding = Binding(plan, Guard([]), {}, {})
    for _ in range(3):
        with pytest.raises(HybridError, match="starve"):
            plan.run(binding, [torch.ones(N)])
    assert torch.equal(torch.ones(1 << 20).add(1), torch.full((1 << 20,), 2.0))
