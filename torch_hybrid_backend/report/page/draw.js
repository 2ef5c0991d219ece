// Draws and colours the placed boxes with d3.
"use strict";

// Distinct for colour-blind readers (Okabe and Ito); eager is grey.
const ENGINE_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const EAGER_COLOUR = "#8a8f98";

function engineColours(graphs) {
  const names = new Set(graphs.flatMap((graph) => graph.nodes.map((node) => node.engine)));
  names.delete("eager");
  const sorted = [...names].sort();
  return new Map([...sorted.map((name, i) => [name, ENGINE_COLOURS[i % ENGINE_COLOURS.length]]), ["eager", EAGER_COLOUR]]);
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Share of the time of all operators -> colour, on a logarithmic scale: 0.1% and 1% differ as much as 10% and 100%.
const LEAST_SHARE = 0.001;

function heat(share) {
  const mixed = d3.interpolateRgbBasis([css("--cool"), css("--warm"), css("--hot")]);
  return mixed(Math.max(0, 1 - Math.log10(Math.max(share, LEAST_SHARE)) / Math.log10(LEAST_SHARE)));
}

function mainEngine(item) {
  return d3.greatest(Object.entries(item.engines), ([, part]) => part.us * 1e6 + part.count)?.[0];
}

function fillOf(item, view) {
  if (["input", "inputs", "output"].includes(item.kind)) return css("--panel");
  if (view.colour === "time" && !item.open) return heat(item.us / view.operators);
  if (view.colour === "time") return css("--panel");
  return d3.interpolateRgb(css("--panel"), view.colours.get(mainEngine(item)) || EAGER_COLOUR)(item.open ? 0.08 : 0.24);
}

function inkOn(fill) {
  const { l } = d3.lab(fill);
  return l > 58 ? "#1c2128" : "#f5f7fa";
}

function drawTree(root, graph, view, on) {
  const canvas = d3.select("#canvas");
  canvas.selectChildren().remove();
  drawBox(canvas.append("g"), root, graph, view, on);
}

function drawBox(group, box, graph, view, on) {
  group.attr("transform", `translate(${box.x},${box.y})`);
  if (box.parent) frame(group, box, graph, view, on);
  if (!box.open) return;
  const line = d3.line((p) => p.x, (p) => p.y).curve(d3.curveBasis);
  const edges = group.append("g").attr("class", "edges");
  for (const edge of box.edges) {
    for (const points of edge.paths) {
      const path = edges.append("path").attr("class", "edge").attr("d", line(points)).datum(edge);
      path.attr("stroke-width", 1 + Math.max(0, Math.log2(1 + d3.max(edge.values, (v) => v.bytes)) - 10) / 5);
      if (typeof edge.to !== "string") path.attr("marker-end", edge.to.open ? null : "url(#arrow)");
      path.append("title").text(edge.values.map((v) => `${v.name}: ${v.out.join(", ")}, ${bytesInWords(v.bytes)}`).join("\n"));
    }
  }
  group.selectChildren(".title, .fold").raise(); // edges pass behind them
  for (const child of box.children) drawBox(group.append("g"), child, graph, view, on);
  for (const edge of box.edges) {
    if (!edge.at) continue;
    const width = d3.max(edge.label, (line) => textWidth(line, 9.5)) + 4;
    group.append("rect").attr("class", "paper").attr("x", edge.at.x - width / 2).attr("y", edge.at.y - 12).attr("width", width).attr("height", 23);
    edge.label.forEach((line, i) => group.append("text").attr("class", "value").attr("x", edge.at.x).attr("y", edge.at.y - 3 + 11 * i).text(line));
  }
}

function frame(group, box, graph, view, on) {
  const fill = fillOf(box, view);
  const colour = view.colours.get(mainEngine(box)) || EAGER_COLOUR;
  group
    .attr("class", `box ${box.kind}${box.open ? " open" : ""}${box === view.selected ? " selected" : ""}`)
    .attr("data-id", box.id)
    .attr("tabindex", 0)
    .attr("role", "button")
    .attr("aria-label", `${box.label} ${box.className || ""}`)
    .on("click", (event) => { event.stopPropagation(); on.select(box, event.target.closest(".fold") !== null); })
    .on("dblclick", (event) => { event.stopPropagation(); on.toggle(box); })
    .on("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      on.select(box, box.children !== undefined);
    });
  const shape = (dx, dy) =>
    group.append("rect").attr("x", dx).attr("y", dy).attr("width", box.width).attr("height", box.height).attr("rx", box.open ? 8 : 5);
  if (box.kind === "repeat" && !box.open) for (const by of [8, 4]) shape(by, by).attr("class", "behind").attr("fill", fill);
  shape(0, 0).attr("class", "shape").attr("fill", fill);
  const ink = inkOn(fill);
  if (box.open) {
    group.append("text").attr("class", "title").attr("x", 28).attr("y", 17).attr("fill", ink).attr("stroke", fill).text(titleOf(box, graph));
  } else {
    const x = box.children ? 24 : 12;
    group.append("text").attr("class", "name").attr("x", x).attr("y", 16).attr("fill", ink).text(box.lines[0]);
    group.append("text").attr("class", "about").attr("x", x).attr("y", 31).attr("fill", ink).text(box.lines[1]);
    if (box.kind === "operator" && view.colour === "engine") group.append("rect").attr("width", 4).attr("height", box.height).attr("rx", 2).attr("fill", colour);
    if (box.children) mix(group, box, view);
  }
  if (box.children) {
    const fold = group.append("g").attr("class", "fold").attr("transform", "translate(14,13)");
    fold.append("circle").attr("r", 7);
    fold.append("path").attr("d", box.open ? "M-3.5,0H3.5" : "M-3.5,0H3.5M0,-3.5V3.5");
    fold.append("title").text(box.open ? "Fold" : "Unfold");
  }
  if (box.refused && !box.open) group.append("circle").attr("class", "refused").attr("cx", box.width - 8).attr("cy", 8).attr("r", 3.5);
  group.append("title").text(wholeTitle(box));
}

// The full name of a box, whose text may be cut.
function wholeTitle(box) {
  const name = box.children ? box.id.replace(/\/.*/, "") : box.kind === "operator" ? `${box.node.op} ${box.node.name}` : "";
  const count = box.children && box.count ? operatorsInWords(box) : "";
  return [...new Set([box.label, box.className, name, box.node?.module, count].filter(Boolean))].join("\n");
}

// Draws the share of each engine along the lower edge of a folded box.
function mix(group, box, view) {
  const by = box.us ? "us" : "count";
  let x = 8;
  for (const [engine, part] of Object.entries(box.engines).sort()) {
    const width = ((box.width - 16) * part[by]) / box[by];
    group.append("rect").attr("x", x).attr("y", box.height - 7).attr("width", width).attr("height", 3.5).attr("fill", view.colours.get(engine));
    x += width;
  }
}
