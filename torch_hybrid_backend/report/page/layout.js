// Places boxes and edges. dagre lays out each unfolded box by itself, the inner boxes first.
"use strict";

const HEAD = 25; // height of an unfolded box's title
const PAD = 10;
const pen = document.createElement("canvas").getContext("2d");
const SHORT = { float32: "f32", float64: "f64", float16: "f16", bfloat16: "bf16", int64: "i64", int32: "i32", int8: "i8", uint8: "u8" };
const FONT = "system-ui, sans-serif";

function textWidth(text, size, weight) {
  pen.font = `${weight || 400} ${size}px ${FONT}`;
  return pen.measureText(text).width;
}

function shortened(text, most) {
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}

function bytesInWords(bytes) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (bytes >= size) return `${(bytes / size).toFixed(bytes / size < 10 ? 1 : 0)} ${unit}`;
  return `${bytes} B`;
}

// The same as `time_in_words` of core/units.py.
function timeInWords(us) {
  if (us < 1e3) return `${us.toFixed(1)} us`;
  const [value, unit] = us < 1e6 ? [us / 1e3, "ms"] : [us / 1e6, "s"];
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}

function operatorsInWords(box) {
  const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  return counted(box.count, "operator") + (box.views ? ` and ${counted(box.views, "view")}, not drawn` : "");
}

// The two lines of a box: its name in the user's code, then its operator or class.
function linesOf(item, graph) {
  if (item.kind === "input") return [shortened(item.label, 34), shortened(item.node.out.join(", "), 34)];
  if (item.kind === "inputs") return [item.label, ""];
  if (item.kind === "output") return [item.label, item.node.in.length > 1 ? "" : shortened(item.node.out.join(", "), 34)];
  const time = graph.timing !== "work" && item.us >= 0.05 ? timeInWords(item.us) : "";
  if (item.kind === "operator") {
    const fused = graph.timing === "measured" && item.node.kernels && !time;
    const what = item.named ? shortName(item.node.op) : "";
    return [shortened(item.label, 34), [shortened(what, 26), fused ? "fused" : time].filter(Boolean).join(" · ")];
  }
  return [shortened(item.label, 34), [shortened(item.className, 30), `${item.count} ops`, time].filter(Boolean).join(" · ")];
}

function layoutTree(graph, tree, direction) {
  const edges = visibleEdges(graph, tree);
  const byBox = d3.group(edges, (edge) => edge.box);
  layoutBox(tree.root, graph, byBox, direction);
  tree.root.x = tree.root.y = 0;
  return tree.root;
}

function layoutBox(box, graph, byBox, direction) {
  if (!box.open) {
    box.lines = linesOf(box, graph);
    box.width = Math.max(84, textWidth(box.lines[0], 12.5, 600), textWidth(box.lines[1], 10.5)) + (box.children ? 36 : 24);
    box.height = (box.lines[1] ? 38 : 26) + (box.children ? 8 : 0);
    box.key = null;
    return;
  }
  for (const child of box.children) layoutBox(child, graph, byBox, direction);
  // A box stays as it is if nothing in it has changed.
  const key = [direction, ...box.children.map((child) => (child.open ? child.version : "folded"))].join();
  if (box.key === key) return;
  box.key = key;
  box.version = (box.version || 0) + 1;
  const down = direction === "TB";
  const layout = new dagre.graphlib.Graph({ multigraph: true });
  layout.setGraph({ rankdir: direction, nodesep: down ? 18 : 14, ranksep: down ? 12 : 20, edgesep: 10, marginx: 0, marginy: 0 });
  const edges = byBox.get(box) || [];
  for (const child of box.children) layout.setNode(child.id, { width: child.width, height: child.height });
  const id = (end) => end.id ?? end;
  const ports = new Set(edges.flatMap((edge) => [edge.from, edge.to]).filter((end) => typeof end === "string"));
  for (const port of ports) layout.setNode(port, { width: 4, height: 4 });
  edges.forEach((edge, i) => {
    edge.label = labelOf(edge);
    const reserved = edge.label.length ? { width: d3.max(edge.label, (line) => textWidth(line, 9.5)) + 8, height: 24, labelpos: "c" } : {};
    layout.setEdge(id(edge.from), id(edge.to), { weight: 2, ...reserved }, String(i));
  });
  // Ports, at which values enter and leave a box, belong on its border: short heavy edges hold them there.
  if (ports.size) {
    for (const end of ["in", "out"]) layout.setNode(end, { width: 0, height: 0 });
    for (const port of ports) {
      if (port.startsWith("in:")) layout.setEdge("in", port, { weight: 60 }, "port");
      else layout.setEdge(port, "out", { weight: 60 }, "port");
    }
  }
  dagre.layout(layout);
  // The border encloses children and edges; ports lie on it.
  const extent = (axis, size) => {
    const ends = box.children.map((child) => layout.node(child.id)).flatMap((n) => [n[axis] - n[size] / 2, n[axis] + n[size] / 2]);
    const placed = layout.edges().filter((edge) => edge.name !== "port").map((edge) => layout.edge(edge));
    const inside = axis === (down ? "x" : "y") ? placed.flatMap((edge) => edge.points.map((p) => p[axis])) : [];
    const labels = placed.filter((edge) => edge.width).flatMap((edge) => [edge[axis] - edge[size] / 2, edge[axis] + edge[size] / 2]);
    return d3.extent([...ends, ...inside, ...labels]);
  };
  const [left, right] = extent("x", "width");
  const [top, bottom] = extent("y", "height");
  const title = box.parent ? textWidth(titleOf(box, graph), 12, 600) + 34 : 0;
  const head = box.parent ? HEAD : 0;
  const inner = { width: right - left, height: bottom - top };
  const width = Math.max(inner.width + 2 * PAD, title);
  const dx = (width - inner.width) / 2 - left;
  const dy = head + PAD - top;
  box.width = width;
  box.height = inner.height + head + 2 * PAD;
  for (const child of box.children) {
    const at = layout.node(child.id);
    child.x = at.x - at.width / 2 + dx;
    child.y = at.y - at.height / 2 + dy;
  }
  box.ports = {};
  for (const port of ports) {
    const at = layout.node(port);
    const first = port.startsWith("in:");
    box.ports[port] = down ? { x: at.x + dx, y: first ? 0 : box.height } : { x: first ? 0 : box.width, y: at.y + dy };
  }
  box.edges = edges.map((edge, i) => {
    const placed = layout.edge({ v: id(edge.from), w: id(edge.to), name: String(i) });
    const points = placed.points.map((p) => ({ x: p.x + dx, y: p.y + dy }));
    return { ...edge, points, at: placed.x === undefined ? null : { x: placed.x + dx, y: placed.y + dy } };
  });
  for (const edge of box.edges) edge.paths = pathsOf(edge, box);
}

// An edge ends at ports of unfolded boxes, and continues inside them.
function pathsOf(edge, box) {
  const end = (item, side, maker) => {
    if (typeof item === "string") return box.ports[item];
    const port = item.open && item.ports[side + maker];
    return port && { x: item.x + port.x, y: item.y + port.y };
  };
  const makers = new Set(edge.values.map((value) => value.maker));
  const found = new Map();
  for (const maker of makers) {
    const points = edge.points.slice();
    const first = end(edge.from, "out:", maker);
    const last = end(edge.to, "in:", maker);
    if (first) points[0] = first;
    if (last) points[points.length - 1] = last;
    found.set(JSON.stringify(points), points);
  }
  return [...found.values()];
}

function labelOf(edge) {
  if (typeof edge.from === "string" || typeof edge.to === "string") return []; // the edge outside the box has the label
  const [first] = edge.values;
  if (!first.out.length || edge.from.kind === "input") return [];
  const more = edge.values.length > 1 ? ` +${edge.values.length - 1}` : "";
  const [shape, dtype] = first.out[0].split(" ");
  return [shortened(shape, 24), `${SHORT[dtype] || dtype} · ${bytesInWords(first.bytes)}${more}`];
}

function titleOf(box, graph) {
  const time = graph.timing !== "work" && box.us ? timeInWords(box.us) : "";
  return [shortened(box.label, 40), shortened(box.className, 40), time].filter(Boolean).join(" · ");
}
