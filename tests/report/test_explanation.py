"""The result of `explain`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.report.plans_for_tests import EMPTY, PLAN
from torch_hybrid_backend.core.engine import CompiledRegionBase, KernelText
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.report import Explanation, render_html, render_text


def test_it_prints_as_text_and_converts() -> None:
    """print(explain(...)) is the report. JSON gives the plans back."""
    explanation = Explanation((PLAN, EMPTY))
    assert str(explanation) == render_text([PLAN, EMPTY])
    assert explanation.to_html() == render_html([PLAN, EMPTY])
    plans = json.loads(explanation.to_json())["plans"]
    assert [Plan.from_json(json.dumps(plan)) for plan in plans] == [PLAN, EMPTY]


class _Region(CompiledRegionBase):
    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return []

    def texts(self) -> Sequence[KernelText]:
        return [KernelText(name, f"text of {name}", ".py") for name in self.names]


def test_kernels_are_written_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """Each kernel is one file, however often it is called. Regions of engines without texts have none."""
    compiled = ({"r0": _Region("norm", "matmul", "norm"), "r1": _Region()}, {"r0": _Region("softmax")})
    written = Explanation((), compiled).write_kernels(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["000_r0_norm.py", "001_r0_matmul.py", "003_r0_softmax.py"]
    assert [path.read_text() for path in written] == ["text of norm", "text of matmul", "text of softmax"]
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())
