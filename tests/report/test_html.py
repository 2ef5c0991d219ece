"""Plans as a picture."""

from __future__ import annotations

from html.parser import HTMLParser

from tests.report.plans_for_tests import CONVERTED, EMPTY, NOT_USED, PLAN, USED
from torch_hybrid_backend.report import render_html

_VOID = {"meta"}


class _Balance(HTMLParser):
    """Collects element classes, and fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.classes.append(dict(attrs).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_every_operator_is_a_cell_in_well_formed_html() -> None:
    """One cell per operator, one frame per run of a region, the tables of the text, all text escaped."""
    page = render_html([PLAN, EMPTY])
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.classes.count("cell") == len(PLAN.nodes)
    assert parser.classes.count("segment") == 3
    text = " ".join(parser.text)
    for shown in ("tvm 12.3 us, eager 31.5 us (measured)", "deadline", "belongs to <is> & stays"):
        assert shown in text


def test_a_plan_that_is_not_used_is_said_to_be() -> None:
    """As in the text."""
    page = render_html([NOT_USED])
    for shown in (
        "a whole call: plan 70.0 us",
        "not_profitable: a call takes 70.0 us",
        "the plan, which is not used",
    ):
        assert shown in page
    assert "not used" not in render_html([PLAN, USED])


def test_reduced_precision_is_shown() -> None:
    """The sentence of the text, each region's precision and error, and the layers that stayed as written."""
    parser = _Balance()
    parser.feed(render_html([CONVERTED]))
    text = " ".join(parser.text)
    for shown in (
        "converted 71/123 operators to int8, 4 to bfloat16, using 2 casts (54 of weights, made once)",
        "int8 and bfloat16, off by 0.012",
        "layer as written",
        "off by <0.3> & more",
    ):
        assert shown in text


def test_the_page_loads_nothing() -> None:
    """Self-contained: no script, no address."""
    page = render_html([PLAN])
    assert "<script" not in page
    assert "http" not in page


def test_no_plans() -> None:
    """A model without a graph is said to have none."""
    assert "no graph was compiled" in render_html([])
