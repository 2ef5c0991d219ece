// The state of the page (`view`) and the user's actions. Each action changes the state and draws from it.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const view = { number: 0, colour: "engine", views: false, direction: "", selected: null, colours: engineColours(data.graphs), operators: 1, total: 1 };
const READABLE = 0.5; // the least scale at which a text of 12 pixels can be read
let graph = null;
let tree = null;
const svg = d3.select("#graph");
const zoom = d3.zoom().scaleExtent([0.02, 4]).on("zoom", (event) => d3.select("#canvas").attr("transform", event.transform));
svg.call(zoom).on("dblclick.zoom", null).on("click", () => select(null));

function show(number) {
  view.number = number;
  document.getElementById("pick").value = number;
  graph = data.graphs[number];
  document.querySelectorAll("[data-graph]").forEach((part) => (part.hidden = Number(part.dataset.graph) !== number));
  rebuild();
}

function rebuild() {
  tree = buildTree(graph, view.views);
  view.selected = null;
  view.operators = tree.root.us || 1;
  view.total = tree.root.us + (graph.other_us || 0) || 1;
  // Unfold as many boxes as can be read at once.
  let fits = 1;
  for (const most of d3.range(4, 27, 2)) {
    unfoldSome(tree.root, most);
    if (arrange() < READABLE) break;
    fits = most;
  }
  unfoldSome(tree.root, fits);
  arrange();
  refresh(true);
  details(null);
}

// Chooses the direction that fills the panel better, unless the user has chosen one.
function arrange() {
  const scales = (view.direction ? [view.direction] : ["TB", "LR"]).map((way) => [way, scaleOf(layoutTree(graph, tree, way))]);
  const [way, scale] = scales.reduce((a, b) => (b[1] > a[1] * 1.15 ? b : a));
  tree.direction = way;
  return scale;
}

function scaleOf(root) {
  const box = svg.node().getBoundingClientRect();
  return Math.min((box.width - 40) / root.width, (box.height - 40) / root.height);
}

function refresh(fitted) {
  const start = view.selected && { ...place(view.selected) };
  const placed = layoutTree(graph, tree, tree.direction);
  drawTree(placed, graph, view, { select, toggle });
  drawFlame(graph, tree, view, { select });
  legend();
  if (fitted) return fit();
  if (!start || !isShown(view.selected)) return;
  const end = place(view.selected); // the selected box stays where it was
  svg.call(zoom.translateBy, start.x - end.x, start.y - end.y);
}

function place(item) {
  const at = { x: item.x || 0, y: item.y || 0 };
  for (const box of ancestors(item)) { at.x += box.x || 0; at.y += box.y || 0; }
  return at;
}

function fit() {
  zoomTo(tree.root, 0, 1.25);
}

// Zooms to a box. A box that is too large to be read whole is shown from its beginning.
function zoomTo(item, duration, most) {
  const box = svg.node().getBoundingClientRect();
  const at = place(item);
  const whole = Math.min(most, (box.width - 40) / item.width, (box.height - 40) / item.height);
  const scale = Math.max(whole, READABLE * 0.7);
  const start = (room, size, from) => (size * scale > room - 40 ? 20 : (room - size * scale) / 2) - from * scale;
  const to = d3.zoomIdentity.translate(start(box.width, item.width, at.x), start(box.height, item.height, at.y)).scale(scale);
  (duration ? svg.transition().duration(duration) : svg).call(zoom.transform, to);
}

// Brings an item into the panel, with the box around it if that can be read.
function bring(item, duration) {
  const box = svg.node().getBoundingClientRect();
  const fits = (each) => Math.min((box.width - 40) / each.width, (box.height - 40) / each.height) >= READABLE;
  zoomTo(fits(item.parent) ? item.parent : item, duration, 1.1);
}

function isInPanel(item) {
  const box = svg.node().getBoundingClientRect();
  const to = d3.zoomTransform(svg.node());
  const at = place(item);
  const seen = (start, size, room) => Math.min(start + size, room) - Math.max(start, 0) >= Math.min(size, 40);
  return seen(to.applyX(at.x), item.width * to.k, box.width) && seen(to.applyY(at.y), item.height * to.k, box.height);
}

function toggle(box) {
  if (!box.children) return;
  box.open = !box.open;
  view.selected = box;
  refresh(false);
  details(box);
  d3.select(`[data-id="${CSS.escape(box.id)}"]`).node()?.focus({ preventScroll: true });
}

function select(item, folds) {
  if (item && folds && item.children) return toggle(item);
  view.selected = item;
  if (item && !isShown(item)) {
    reveal(item);
    refresh(false);
    bring(item, 300);
  } else if (item && item.parent && !isInPanel(item)) bring(item, 300);
  d3.selectAll(".box").classed("selected", function () { return item !== null && this.dataset.id === item.id; });
  d3.selectAll(".edge").classed("near", (edge) => item !== null && (edge.from === item || edge.to === item));
  drawFlame(graph, tree, view, { select });
  details(item);
}

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (item) => item.kind === "operator" && item.parent.children.includes(item) &&
    words.every((word) => `${item.node.name} ${item.node.op} ${item.node.module} ${item.node.source}`.toLowerCase().includes(word));
  const found = words.length ? [...tree.operators.values()].filter(fits) : [];
  const list = d3.select("#found").attr("hidden", found.length ? null : true);
  list.selectChildren().remove();
  for (const item of found.slice(0, 30)) {
    list.append("button").text(`${item.node.module || "(outermost)"} · ${shortName(item.node.op)} · ${item.node.name}`).on("click", () => select(item));
  }
  return found;
}

function legend() {
  const host = d3.select("#legend");
  host.selectChildren().remove();
  if (view.colour === "engine") {
    const used = Object.keys(tree.root.engines).sort();
    for (const engine of used) {
      host.append("span").attr("class", "key").style("background", view.colours.get(engine));
      host.append("span").text(engine);
    }
  } else {
    const least = Math.log10(LEAST_SHARE);
    host.append("span").text(`of ${graph.timing === "work" ? "all work" : timeInWords(view.operators) + " in operators"}: ${100 * LEAST_SHARE}%`);
    const scale = host.append("span").attr("class", "scale");
    scale.style("background", `linear-gradient(90deg, ${d3.range(0, 1.01, 0.1).map((x) => heat(10 ** (least * (1 - x)))).join(",")})`);
    for (const share of [0.01, 0.1]) scale.append("i").style("left", `${100 * (1 - Math.log10(share) / least)}%`).text(`${100 * share}%`);
    host.append("span").text("100%");
  }
  if (tree.root.refused) {
    host.append("span").attr("class", "key round");
    host.append("span").text("an engine refused it");
  }
}

d3.select("#pick").on("change", (event) => show(Number(event.target.value)));
d3.selectAll("[name=colour]").on("change", (event) => { view.colour = event.target.value; refresh(false); });
d3.select("#views").on("change", (event) => { view.views = event.target.checked; rebuild(); });
d3.select("#fold").on("click", () => { setOpen(tree.root, false); refresh(true); });
d3.select("#unfold").on("click", () => { setOpen(tree.root, true); refresh(true); });
d3.select("#turn").on("click", () => { view.direction = tree.direction = tree.direction === "LR" ? "TB" : "LR"; refresh(true); });
d3.select("#fit").on("click", fit);
d3.select("#theme").on("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  refresh(false);
});
d3.select("#search").on("input", (event) => search(event.target.value)).on("keydown", (event) => {
  if (event.key === "Enter") { const [first] = search(event.target.value); if (first) select(first); }
});
d3.select(window).on("resize", () => { refresh(true); if (view.selected?.parent) bring(view.selected, 0); }).on("keydown", (event) => {
  if (event.target.matches("input, select")) return;
  const keys = { f: fit, "+": () => svg.call(zoom.scaleBy, 1.25), "-": () => svg.call(zoom.scaleBy, 0.8), Escape: () => select(null) };
  if (event.key === "/") { event.preventDefault(); document.getElementById("search").focus(); }
  else keys[event.key]?.();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => refresh(false));
document.querySelectorAll("table.sorts th").forEach((head, column) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0];
  const at = [...head.parentElement.children].indexOf(head);
  const key = (row) => row.children[at].dataset.value ?? row.children[at].textContent;
  const down = head.dataset.order !== "down";
  head.dataset.order = down ? "down" : "up";
  const order = (a, b) => (isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b));
  body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
}));

// Shows what the address asks for: "#color=time&graph=1&select=layer1.0&theme=dark".
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.get("theme")) document.documentElement.dataset.theme = wanted.get("theme");
  if (wanted.get("color")) {
    view.colour = wanted.get("color");
    document.querySelector(`[name=colour][value=${CSS.escape(view.colour)}]`).checked = true;
  }
  if (!data.graphs.length) return;
  const name = wanted.get("select");
  const holds = (each) => each.modules.some(([path]) => path === name) || each.nodes.some((node) => node.name === name);
  const holder = name ? data.graphs.findIndex(holds) : -1;
  show(Math.min(Number(wanted.get("graph") ?? (holder < 0 ? largest(data.graphs) : holder)), data.graphs.length - 1));
  if (wanted.has("unfold")) d3.select("#unfold").dispatch("click");
  if (name) goTo(name);
}

// The slowest graph, or the one with most operators if not all were timed.
function largest(graphs) {
  const timed = graphs.every((each) => each.timing !== "work");
  return d3.greatestIndex(graphs, (each) => (timed ? d3.sum(each.nodes, (node) => node.us || 0) + each.other_us : each.nodes.length));
}

// Unfolds and selects a module or operator, and unfolds the boxes around it.
function goTo(name) {
  const find = () => tree.boxes.get(name) || tree.operators.get(name);
  if (find() && !isDrawn(find())) d3.select("#views").property("checked", true).dispatch("change"); // a view
  const item = find();
  if (!item?.parent) return;
  reveal(item);
  if (item.children) item.open = true;
  view.selected = item;
  refresh(false);
  bring(item, 0);
  select(item);
}

addEventListener("hashchange", follow);
follow();
