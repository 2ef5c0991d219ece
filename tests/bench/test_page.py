"""The HTML page of `hybrid bench`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.bench.test_record import MACHINE, group, result
from torch_hybrid_backend.bench.page import html
from torch_hybrid_backend.bench.record import Record


def test_bars_are_as_long_as_times() -> None:
    """Each runtime with figures has a bar; hybrid's has its own colour. The page loads nothing, and names are escaped."""
    gap = {"peer": "zentorch", "batch": 8, "gap": "<no rule>"}
    page = html(Record("m:<f>", False, MACHINE, {}, [group(result("hybrid", 10.0), result("eager", 20.0), gap)]))
    [svg] = re.findall("<svg.*?</svg>", page)
    bars = ElementTree.fromstring(svg).findall("rect")
    ours, eager = (float(bar.attrib["width"]) for bar in bars)
    assert abs(eager - 2 * ours) < 0.2
    assert bars[0].attrib["fill"] != bars[1].attrib["fill"]
    assert "&lt;no rule&gt;" in page
    assert "&lt;f&gt;" in page
    assert "http" not in page
    assert "<script" not in page


def test_remarks_stand_with_the_verdict() -> None:
    """Verdicts and notes stand before the table. Runtimes that are not installed are listed once, after the last section."""
    gap = {"peer": "zentorch", "batch": 8, "gap": "not installed: pip install zentorch"}
    found = group(result("hybrid", 10.0, spread_ms=30.0, other_load=0.5), result("eager", 20.0), gap)
    page = html(Record("m:f", False, MACHINE, {}, [found, found]))
    verdict, remark = (
        page.index("<b>not decided: hybrid against eager"),
        page.index("<p>hybrid: measured beside other load"),
    )
    assert verdict < remark < page.index("<table>")
    assert page.count("pip install zentorch") == 1
    assert page.index("pip install zentorch") > page.rindex("</section>")
