"""What explain() returns."""

from __future__ import annotations

import json

from tests.report.plans_for_tests import EMPTY, PLAN
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.report import Explanation, render_html, render_text


def test_it_prints_as_text_and_converts() -> None:
    """print(explain(...)) is the report; JSON gives the plans back."""
    explanation = Explanation((PLAN, EMPTY))
    assert str(explanation) == render_text([PLAN, EMPTY])
    assert explanation.to_html() == render_html([PLAN, EMPTY])
    plans = json.loads(explanation.to_json())["plans"]
    assert [Plan.from_json(json.dumps(plan)) for plan in plans] == [PLAN, EMPTY]
