"""Plans as text."""

from __future__ import annotations

import dataclasses

import torch

import torch_hybrid_backend
from tests.conftest import Golden
from tests.report.plans_for_tests import CONVERTED, EMPTY, GRAPHS, NOT_COMPARED, NOT_USED, PLAN, USED
from torch_hybrid_backend.core.plan import Attempt, Plan
from torch_hybrid_backend.report import render_html, render_text


def test_text(golden: Golden) -> None:
    """The text has operators by kind, engine and cost of regions, and every refusal with code and line."""
    golden.check(render_text([PLAN, EMPTY]))


def test_whole_calls(golden: Golden) -> None:
    """Whole calls are shown with engine and cost. A plan that is not used has the reason, and its regions."""
    golden.check(render_text([USED, NOT_USED]))


def test_cuda_graphs() -> None:
    """Kernels of a CUDA graph are shown together."""
    _, *lines = render_text([GRAPHS]).splitlines()
    assert lines == [
        "  one CUDA graph of 3 kernels: 2 matmul_gelu, row_softmax",
        "  one CUDA graph of 1 kernel: row_softmax",
    ]


def test_reduced_precision(golden: Golden) -> None:
    """The text has the converted operators, the casts, the error by region, and every layer left as written with code and line."""
    golden.check(render_text([CONVERTED, NOT_COMPARED]))


def test_ways_that_were_tried() -> None:
    """A region that an engine had to compute more exactly shows the attempts before, with their errors."""
    attempts = (
        Attempt("as written", "a relative error of 0.03"),
        Attempt("fp32 accumulation", "a relative error of 0.02"),
        Attempt("fp32 layers"),
    )
    plan = dataclasses.replace(PLAN, regions=(dataclasses.replace(PLAN.regions[0], attempts=attempts),))
    line = "with fp32 layers, after a relative error of 0.03 as written; a relative error of 0.02 fp32 accumulation"
    assert f"      {line}" in render_text([plan]).splitlines()
    assert line in render_html([plan])
    assert Plan.from_json(plan.to_json()) == plan


def test_what_an_engine_has_to_say() -> None:
    """An engine's note about a region is a line of its own."""
    note = "weights as inputs: they take 544 bytes"
    plan = dataclasses.replace(PLAN, regions=(dataclasses.replace(PLAN.regions[0], note=note),))
    assert f"      {note}" in render_text([plan]).splitlines()
    assert note in render_html([plan])
    assert Plan.from_json(plan.to_json()) == plan


def test_no_plans() -> None:
    """Without a graph, the text says so."""
    assert render_text([]).startswith("no graph was compiled: ")


def test_a_first_call_that_cannot_be_repeated() -> None:
    """A graph that draws random numbers has a line that its first answer may differ from later ones by rounding. Other graphs have none."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.relu(x @ x), 0.5)

    with torch.no_grad():
        text = str(torch_hybrid_backend.explain(noisy, torch.randn(32, 32)))
        assert (
            "first call: its answer may differ from later ones by rounding, as aten.native_dropout.default cannot"
            in text
        )
        assert "first call" not in str(torch_hybrid_backend.explain(torch.relu, torch.randn(32, 32)))
