"""Results of PyTorch's operators and modules have eager's strides, however the inputs lie in memory."""

from __future__ import annotations

import pytest

from tests.operators.layouts import differences
from tests.operators.tasks import Task, tasks

DRAWN = """
    add copysign div.floor_rounding floor_divide heaviside logical_xor nn.functional.batch_norm nn.functional.channel_shuffle
    nn.functional.logsigmoid nn.functional.softplus roll sort where xlogy
""".split()
# They write to the elements of an input: what lies between those is not in the graph's value.
IN_PLACE = frozenset("cauchy exponential geometric log_normal normal.in_place uniform bernoulli".split())
PARTS = 24


@pytest.mark.parametrize("operator", DRAWN)
def test_layouts(operator: str) -> None:
    """The strides of an operator's results, and what `as_strided` reads of them, are eager's."""
    assert list(differences(Task(operator, "float32"), limit=1)) == []


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_layouts_of_all(part: int) -> None:
    """So they are for all operators and modules."""
    wanted = [task for task in tasks(".*", ["float32", "float32 eval"]) if task.subject not in IN_PLACE]
    assert [why for task in wanted[part::PARTS] for why in differences(task, limit=2)] == []
