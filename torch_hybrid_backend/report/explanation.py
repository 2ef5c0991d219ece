"""What `explain()` returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.report.html import render_html
from torch_hybrid_backend.report.text import render_text


def render_json(plans: Sequence[Plan]) -> str:
    """The plans as a JSON object `{"plans": [...]}`, stable; `Plan.from_json` reads one element of it."""
    return json.dumps({"plans": [json.loads(plan.to_json()) for plan in plans]}, indent=2, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plans of every graph one call compiled, in the order of compilation. Prints as text."""

    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        return render_text(self.plans)

    def to_json(self) -> str:
        """As a JSON object with the key `plans`."""
        return render_json(self.plans)

    def to_html(self) -> str:
        """As a self-contained HTML page."""
        return render_html(self.plans)
