"""Plans as text."""

from __future__ import annotations

from tests.conftest import Golden
from tests.report.plans_for_tests import CONVERTED, EMPTY, GRAPHS, NOT_COMPARED, NOT_USED, PLAN, USED
from torch_hybrid_backend.report import render_text


def test_text(golden: Golden) -> None:
    """Operators per kind inside and outside regions, engine and cost per region, every refusal with code and line."""
    golden.check(render_text([PLAN, EMPTY]))


def test_whole_calls(golden: Golden) -> None:
    """Who runs whole calls, at what cost; of a plan that is not used it is said why, and its regions are shown."""
    golden.check(render_text([USED, NOT_USED]))


def test_cuda_graphs() -> None:
    """Which kernels are launched together."""
    _, *lines = render_text([GRAPHS]).splitlines()
    assert lines == [
        "  one CUDA graph of 3 kernels: 2 matmul_gelu, row_softmax",
        "  one CUDA graph of 1 kernel: row_softmax",
    ]


def test_reduced_precision(golden: Golden) -> None:
    """How much was converted to what, by how many casts; what it costs in accuracy, by region; every layer that was not, with code and line."""
    golden.check(render_text([CONVERTED, NOT_COMPARED]))


def test_no_plans() -> None:
    """A model without a graph is said to have none."""
    assert render_text([]) == "no graph was compiled"
