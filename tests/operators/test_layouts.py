"""Results of PyTorch's operators and modules have eager's strides, however the inputs lie in memory."""

from __future__ import annotations

import pytest

from tests.operators.layouts import differences
from tests.operators.tasks import Task, tasks

DRAWN = """
    add copysign div.floor_rounding floor_divide heaviside logical_xor nn.functional.batch_norm nn.functional.channel_shuffle
    nn.functional.logsigmoid nn.functional.softplus roll sort where xlogy
""".split()
PARTS = 24


@pytest.mark.parametrize("operator", DRAWN)
def test_layouts(operator: str) -> None:
    """The strides of an operator's results, and what `as_strided` reads of them, are eager's."""
    assert list(differences(Task(operator, "float32"), limit=1)) == []


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_layouts_of_all(part: int) -> None:
    """So they are for all operators and modules that draw no random numbers."""
    wanted = tasks(".*", ["float32", "float32 eval"])
    assert [why for task in wanted[part::PARTS] for why in differences(task, limit=2)] == []
