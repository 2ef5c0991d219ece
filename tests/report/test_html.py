"""Plans as an HTML page."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

from tests.report.plans_for_tests import CONVERTED, EMPTY, NOT_USED, PLAN, USED, graph_of_blocks, profiled
from torch_hybrid_backend.core.plan import Ceilings, GraphBreak
from torch_hybrid_backend.report import render_html
from torch_hybrid_backend.report.picture import picture

_VOID = {"meta", "input", "br"}


class _Balance(HTMLParser):
    """Parser that collects elements and text, and fails on unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_well_formed_html_with_the_data_of_each_plan() -> None:
    """Each plan has a section of lines and one of tables. The graphs are JSON for the scripts, and all text is escaped."""
    about = {"model": "A <Net>", "machine": "EPYC, 2 threads", "date": "2026-11-28"}
    page = render_html([PLAN, EMPTY], about)
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.tags.count("section") == 4
    assert parser.tags.count("option") == 2
    text = " ".join(parser.text)
    for shown in (
        "A <Net>",
        "EPYC, 2 threads",
        "tvm 12.3 us, eager 31.5 us (measured)",
        "deadline",
        "belongs to <is> & stays",
    ):
        assert shown in text
    data = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == {"graphs": [picture(PLAN), picture(EMPTY)]}


def test_kernels_that_were_timed_are_a_table() -> None:
    """Timed kernels are a table in readable units, the slowest first, sorted by number."""
    page = render_html([profiled(graph_of_blocks(2))])
    assert '<td class="n" data-value="50">50.0 us</td>' in page
    assert page.index("<td>eager</td>") < page.index("<td>matmul_relu_add</td>")
    assert "Kernels by time" in page
    assert "Kernels by time" not in render_html([PLAN])


def test_the_head_says_inputs_once_and_counts_views() -> None:
    """The model and its inputs stand once, in the head or in the list of graphs. Views, which are not drawn, are counted."""
    plan = graph_of_blocks(2)
    about = {"model": "Net", "inputs": "8x8 float32"}
    (line,) = re.findall('<p class="line">(.*)</p>', render_html([plan], about))
    assert line.startswith(
        "inference: 10 operators (3 views among them, drawn on request), 2.05 kFLOP, 1 region; tvm runs 8"
    )
    (line,) = re.findall('<p class="line">(.*)</p>', render_html([plan]))
    assert line.startswith("graph (inference, 8x8 float32): 10 operators")
    assert '<p class="line">graph (' not in render_html([plan, plan])


def test_graph_breaks_and_ceilings_are_told() -> None:
    """Graph breaks are shown with place, reason and hints; the machine's ceilings, if kernels were timed."""
    found = GraphBreak("model.py:12: print(x)", "a call of <print>", "", ("use torch.compiler.disable",))
    plan = profiled(graph_of_blocks(1))
    assert plan.profile is not None
    measured = dataclasses.replace(plan.profile, ceilings=Ceilings(2, (("float32", 150.0),), 20.0))
    text = " ".join(_text_of(render_html([dataclasses.replace(plan, profile=measured)], graph_breaks=[found])))
    for shown in (
        "1 graph break",
        "model.py:12",
        "a call of <print>",
        "change: use torch",
        "2 threads: 150 GFLOP/s in float32",
    ):
        assert shown in text
    assert "graph break" not in " ".join(_text_of(render_html([plan])))


def _text_of(page: str) -> list[str]:
    parser = _Balance()
    parser.feed(page)
    return parser.text


def test_a_text_of_the_users_ends_no_script() -> None:
    """Source lines may contain any text, also the end of a script."""
    evil = dataclasses.replace(
        PLAN.nodes[0], source="model.py:1 in f: x = '</script><script>alert(1)</script>{{title}}'"
    )
    page = render_html([dataclasses.replace(PLAN, nodes=(evil,))])
    assert page.count("<script>") == render_html([PLAN]).count("<script>")
    assert "{{title}}" in page


def test_a_plan_that_is_not_used_is_said_to_be() -> None:
    """A plan that is not used is marked as in the text report."""
    page = render_html([NOT_USED])
    for shown in (
        "a whole call: plan 70.0 us",
        "not_profitable: a call takes 70.0 us",
        "the plan, which is not used",
    ):
        assert shown in page
    assert "not used" not in render_html([PLAN, USED])


def test_reduced_precision_is_shown() -> None:
    """The page has the line of the text report, each region's precision and error, and the layers left as written."""
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
    """No address is loaded, and the content security policy forbids it."""
    page = render_html([PLAN])
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=", page)
    assert "default-src 'none'" in page


def test_two_thousand_operators_are_less_than_three_megabytes() -> None:
    """The page of a large model stays small enough to send."""
    plan = profiled(graph_of_blocks(500))
    assert len(plan.nodes) > 2000
    assert len(render_html([plan])) < 3_000_000


def test_no_plans() -> None:
    """Without a graph, the page says so."""
    assert "no graph was compiled" in render_html([])
