"""The page in a real browser: headless Chromium. A script added to the page acts as the user."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.report.plans_for_tests import EMPTY, graph_of_blocks, profiled
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.report import render_html

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
pytestmark = pytest.mark.skipif(_BROWSER is None, reason=f"needs a browser: one of {', '.join(_BROWSERS)}")

# Collect errors of the page's scripts from the start.
_FIRST = "<script>const errors = []; addEventListener('error', (event) => errors.push(event.message));</script></head>"
_HELPERS = """
const all = (query) => [...document.querySelectorAll(query)];
const box = (id) => all(".box").find((each) => each.dataset.id === id);
const ids = () => all(".box").map((each) => each.dataset.id);
const click = (element) => element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const fold = (id) => click(box(id).querySelector(":scope > .fold circle"));
const shown = (id) => document.getElementById(id).textContent;
const seen = {};
"""
# A separate script, so that it reports an error in the one before.
_LAST = """</script><script>
const told = document.createElement("pre");
told.id = "told";
told.textContent = JSON.stringify({ ...(typeof seen === "undefined" ? {} : seen), errors });
document.body.append(told);
"""

Act = Callable[..., dict[str, Any]]


@pytest.fixture
def act(tmp_path: Path) -> Act:
    """Open the page, run a script that writes into `seen`, and return `seen`."""

    def run(page: str, script: str = "", address: str = "") -> dict[str, Any]:
        path = tmp_path / "page.html"
        added = f"<script>{_HELPERS}{script}\n{_LAST}</script></body>"
        path.write_text(page.replace("</head>", _FIRST, 1).replace("</body>", added), encoding="utf-8")
        switches = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1600,900",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command = [str(_BROWSER), *switches, "--virtual-time-budget=60000", "--dump-dom", f"file://{path}#{address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        _, found, after = done.stdout.partition('<pre id="told">')
        assert found, "the script did not come to its end"
        told: dict[str, Any] = json.loads(unescape(after.partition("</pre>")[0]))
        assert told.pop("errors") == []
        return told

    return run


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(image)
        for block in self.blocks:
            x = block(x)
        return torch.sort(self.head(x))


_REPEATED = "/blocks.0…"  # the box that gathers the four blocks


@pytest.mark.slow
def test_a_model_is_drawn_unfolds_and_tells_what_is_clicked(act: Act) -> None:
    """A compiled model: first view, repeated blocks unfolded, a block unfolded, a layer selected, coloured by time, folded again."""
    with torch.no_grad():
        page = torch_hybrid_backend.explain(_Model(), torch.randn(2, 4)).to_html()
    script = f"""
    seen.first = ids();
    seen.repeated = box("{_REPEATED}").textContent;
    seen.values = all("text.value").map((each) => each.textContent);
    seen.flame = all("#flame .part").length;
    seen.ends = all(".box.input .name, .box.output .name").map((each) => each.textContent);
    fold("{_REPEATED}");
    seen.blocks = ids();
    fold("blocks.2");
    const inside = all(".box.open [data-id='blocks.2'] .box, [data-id='blocks.2'] > g.box");
    seen.inside = inside.map((each) => each.querySelector(".name").textContent);
    click(inside.find((each) => each.textContent.includes("linear")));
    seen.details = shown("details");
    seen.selected = all(".box.selected").length;
    const before = box("blocks.1").querySelector(".shape").getAttribute("fill");
    click(all("[name=colour]")[1]);
    seen.recoloured = before !== box("blocks.1").querySelector(".shape").getAttribute("fill");
    click(document.getElementById("fold"));
    seen.folded = ids();
    click(document.getElementById("unfold"));
    seen.unfolded = ids();
    """
    seen = act(page, script)
    assert _REPEATED in seen["first"]
    assert not any(name.startswith("blocks.") for name in seen["first"])
    assert "blocks.0\u20133" in seen["repeated"]
    assert "4 \u00d7 _Block" in seen["repeated"]
    assert "2x16" in seen["values"]
    assert "f32 · 128 B" in seen["values"]
    assert seen["flame"] > 4
    assert seen["ends"] == ["image", "output 1", "output 2"]
    assert {f"blocks.{i}" for i in range(4)} <= set(seen["blocks"])
    assert {"norm", "linear", "relu", "add"} <= set(seen["inside"])
    for shown in ("aten.addmm.default", "blocks.2.linear", "test_page.py", "tvm", "Kernel", "2x16 float32", "Region"):
        assert shown in seen["details"]
    assert seen["selected"] == 1
    assert seen["recoloured"]
    assert len(seen["folded"]) < len(seen["unfolded"])
    assert "blocks.0" in seen["unfolded"]


def test_a_refusal_is_marked_and_told(act: Act) -> None:
    """A refusal has a mark on the box, and its reason in the panel."""
    seen = act(
        render_html([graph_of_blocks(2)]),
        'seen.marks = all(".box .refused").length; click(box("=sort")); seen.told = shown("details");',
    )
    assert seen["marks"] == 1
    assert "tvm: unknown_operator: aten.sort.default has no lowering" in seen["told"]


def test_times_of_kernels_are_used(act: Act) -> None:
    """Boxes and the bar show measured times; the overhead is a part of the bar. A fused operator names its kernel. Both use one colour scale,
    which tells modules apart. Heads of tables are one line."""
    script = """
    seen.bar = shown("flame");
    const part = (name) => all("#flame .part").find((each) => each.textContent.startsWith(name)).querySelector("rect").getAttribute("fill");
    seen.bars = ["layers", "0 ", "sort"].map(part);
    seen.box = box("=sort").querySelector(".shape").getAttribute("fill");
    seen.scale = shown("legend");
    seen.heads = all("th").map((each) => each.getClientRects()[0].height);
    click(box("=relu_1"));
    seen.told = shown("details");
    """
    seen = act(render_html([profiled(graph_of_blocks(2))]), script, "unfold=1&color=time")
    assert len({*seen["bars"]}) == 3
    assert seen["bars"][2] == seen["box"]
    assert seen["scale"].startswith("of 180.0 us in operators: 0.1%1%10%100%")
    assert max(seen["heads"]) < 40
    assert "outside kernels: 20.0 us, 10%" in seen["bar"]
    assert "estimated" not in seen["bar"]
    assert "matmul_relu_add: 50.0 us, 0.0 GFLOP/s, 0.0 GB/s, fused with 3 other operators" in seen["told"]


def test_the_address_says_what_is_shown(act: Act) -> None:
    """The address sets graph, operator, colours and theme; the tables are those of the graph."""
    page = render_html([EMPTY, graph_of_blocks(3)])
    script = """
    seen.theme = document.documentElement.dataset.theme;
    seen.selected = all(".box.selected").map((each) => each.dataset.id);
    seen.sections = all("[data-graph]").filter((each) => !each.hidden).map((each) => each.dataset.graph);
    seen.colour = all("[name=colour]:checked")[0].value;
    """
    seen = act(page, script, "graph=1&select=mm_1&color=time&theme=dark")
    assert seen == {"theme": "dark", "selected": ["=mm_1"], "sections": ["1", "1"], "colour": "time"}


def test_what_the_address_selects_is_unfolded_marked_in_view_and_told(act: Act) -> None:
    """The address can select a module of a folded repetition that calls one operator, a block if all is unfolded, or a view. Of several graphs,
    the one that has the selected name is shown."""
    page = render_html([graph_of_blocks(1), profiled(graph_of_blocks(40)), _flat(400)])
    script = """
    const go = (address) => { location.hash = address; follow(); return state(); };
    const state = () => {
      const chosen = all(".box.selected");
      const [at, panel] = [chosen[0].getBoundingClientRect(), document.getElementById("graph").getBoundingClientRect()];
      const inside = at.top >= panel.top && at.bottom <= panel.bottom && at.left >= panel.left && at.right <= panel.right;
      return { ids: chosen.map((each) => each.dataset.id), inside, told: shown("details"), views: document.getElementById("views").checked };
    };
    seen.layer = go("select=layers.20.linear");
    seen.block = go("select=layers.38&unfold=1");
    seen.view = go("select=t_39");
    seen.graph = document.getElementById("pick").value;
    location.hash = "";
    follow();
    seen.largest = document.getElementById("pick").value;
    """
    seen = act(page, script)
    assert (seen["layer"]["ids"], seen["layer"]["inside"]) == (["=mm_20"], True)
    for shown in ("linear", "Linear", "aten.mm.default", "layers.20.linear", "Time", "model.py:12"):
        assert shown in seen["layer"]["told"]
    assert (seen["block"]["ids"], seen["block"]["inside"]) == (["layers.38"], True)
    for shown in ("Block", "3 operators and 1 view, not drawn", "Time", "Slowest operators", "model.py:12"):
        assert shown in seen["block"]["told"]
    assert (seen["view"]["ids"], seen["view"]["inside"], seen["view"]["views"]) == (["=t_39"], True, True)
    assert (seen["graph"], seen["largest"]) == ("1", "2")


def test_search_and_keys(act: Act) -> None:
    """Enter in the search goes to the first match and unfolds the boxes around it. Enter on a box folds it. Escape deselects."""
    script = """
    const field = document.getElementById("search");
    field.value = "relu layers.2";
    field.dispatchEvent(new Event("input"));
    seen.found = all("#found button").length;
    field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
    seen.selected = all(".box.selected").map((each) => each.dataset.id);
    const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press(document.body, "Escape");
    seen.left = all(".box.selected").length;
    press(box("layers"), "Enter");
    seen.folded = box("=relu_2") === undefined;
    """
    seen = act(render_html([graph_of_blocks(4)]), script)
    assert seen == {"found": 1, "selected": ["=relu_2"], "left": 0, "folded": True}


def test_views_are_shown_on_request(act: Act) -> None:
    """Edges pass through hidden views. Many inputs, as of a training graph, are one box that unfolds; so are many outputs."""
    plan = graph_of_blocks(9)
    inputs = tuple(dataclasses.replace(given, is_constant=False) for given in plan.inputs)
    plan = dataclasses.replace(plan, inputs=inputs, outputs=tuple(f"add_{i}" for i in range(9)))
    script = """
    seen.before = ids();
    seen.ends = all(".box.inputs .name, .box.output .name").map((each) => each.textContent);
    click(document.getElementById("views"));
    click(document.getElementById("unfold"));
    seen.after = ids();
    """
    seen = act(render_html([plan]), script)
    assert not {"=t_1", "=x"} & {*seen["before"]}
    assert {"=t_1", "=x", "=weight_8"} <= {*seen["after"]}
    assert seen["ends"] == ["10 inputs", "9 outputs"]


def _flat(count: int) -> Plan:
    """A plan of operators in a row without modules."""
    plan = graph_of_blocks(count // 4)
    return dataclasses.replace(
        plan, modules=(), nodes=tuple(dataclasses.replace(node, module="") for node in plan.nodes)
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", [graph_of_blocks(500), _flat(2000)], ids=["modules", "without modules"])
def test_two_thousand_operators_begin_with_few_boxes(act: Act, plan: Plan) -> None:
    """The first view has only as many boxes as can be read. Unfolded, all boxes and the edges between them are drawn."""
    script = """
    seen.first = ids().length;
    click(document.getElementById("unfold"));
    seen.all = ids().filter((id) => id.startsWith("=")).length;
    seen.edges = all("path.edge").filter((each) => !each.getAttribute("d").includes("NaN")).length;
    seen.broken = all("path.edge").length - seen.edges;
    """
    seen = act(render_html([plan]), script)
    assert seen["first"] < 80
    assert seen["all"] == sum(not node.is_view for node in plan.nodes) + 2
    assert seen["edges"] >= seen["all"] - 2
    assert seen["broken"] == 0


def test_no_graph(act: Act) -> None:
    """Without a graph, nothing is drawn and nothing fails."""
    assert act(render_html([]), "seen.hidden = document.querySelector('main').hidden;") == {"hidden": True}
