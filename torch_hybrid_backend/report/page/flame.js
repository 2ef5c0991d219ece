// The bar of a call by module, an icicle chart: each row divides the row above.
"use strict";

const ROW = 21;
const MOST_ROWS = 5;
const CAPTIONS = {
  estimated: " · parts are estimated: the cost of each region, divided by work; explain(profile=True) measures kernels",
  work: " · nothing was timed: parts are operations and bytes; explain(profile=True) measures kernels",
};

function drawFlame(graph, tree, view, on) {
  const host = d3.select("#flame");
  host.selectChildren().remove();
  const root = { item: tree.root, label: "call", us: tree.root.us, children: partsOf(tree.root) };
  if (graph.other_us) root.children.push({ label: "outside kernels", us: graph.other_us, children: [] });
  const tops = d3.hierarchy(root, (part) => part.children).sum((part) => (part.children.length ? 0 : part.us));
  if (!tops.value) return;
  const width = host.node().clientWidth - 12;
  const rows = Math.min(tops.height + 1, MOST_ROWS);
  d3.partition().size([width, (tops.height + 1) * ROW])(tops);
  const svg = host.append("svg").attr("width", width).attr("height", rows * ROW);
  const seen = tops.descendants().filter((part) => part.depth < rows && part.x1 - part.x0 > 0.6);
  const part = svg.selectAll("g").data(seen).join("g").attr("transform", (d) => `translate(${d.x0},${d.y0})`);
  part.attr("class", (d) => `part${d.data.item && d.data.item === view.selected ? " selected" : ""}`);
  const fill = (d) => {
    if (!d.data.item || !d.depth) return css("--line");
    if (view.colour === "time") return heat(d.value / view.operators);
    return d3.interpolateRgb(css("--panel"), view.colours.get(mainEngine(d.data.item)) || EAGER_COLOUR)(0.5 - 0.05 * Math.min(d.depth, 5));
  };
  part.append("rect").attr("width", (d) => Math.max(0.5, d.x1 - d.x0 - 1)).attr("height", ROW - 2).attr("rx", 2).attr("fill", fill);
  part.append("text").attr("x", 5).attr("y", 14).attr("fill", (d) => inkOn(fill(d))).text((d) => {
    const room = (d.x1 - d.x0 - 10) / 6.2;
    const estimated = d.depth || graph.timing === "measured" ? "" : CAPTIONS[graph.timing];
    const text = `${d.data.label} ${amount(d.value, tops.value, graph)}${estimated}`;
    return room < 4 ? "" : shortened(room < text.length ? d.data.label : text, Math.floor(room));
  });
  part.append("title").text((d) => `${d.data.label}: ${amount(d.value, tops.value, graph)}`);
  part.on("click", (event, d) => d.data.item && on.select(d.data.item, false));
}

// Parts of a box in the order of the call, down to single operators.
function partsOf(box) {
  return box.children
    .filter((child) => child.us)
    .map((child) => ({ item: child, label: child.label, us: child.us, children: child.children ? partsOf(child) : [] }));
}

function amount(us, total, graph) {
  const share = `${((100 * us) / total).toFixed(us / total < 0.1 ? 1 : 0)}%`;
  return graph.timing === "work" ? share : `${timeInWords(us)}, ${share}`;
}
