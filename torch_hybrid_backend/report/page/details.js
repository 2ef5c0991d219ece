// The panel beside the graph: facts about the selected box.
"use strict";

const MOST_LINES = 4; // source lines shown for a box

function details(item) {
  const panel = d3.select("#details");
  panel.selectChildren().remove();
  if (!item) {
    slowest(panel, tree.root);
    panel.append("p").attr("class", "hint").text("Click a box to see its kernel, time, shapes and source line. Click + to unfold a module.");
    panel.append("p").attr("class", "hint").text("Keys: Tab and Enter to walk and unfold, / to search, f to fit, + and − to zoom, Esc to deselect.");
    return;
  }
  panel.append("h3").text(item.label || graph.title);
  if (item.className) panel.append("p").attr("class", "class").text(item.className);
  const facts = item.children ? factsOfBox(item) : factsOfOperator(item);
  const list = panel.append("dl");
  for (const [name, value] of facts) {
    if (value === undefined || value === "" || (Array.isArray(value) && !value.length)) continue;
    list.append("dt").text(name);
    for (const each of Array.isArray(value) ? value : [value]) list.append("dd").text(each);
  }
  if (item.children) slowest(panel, item);
}

function timeOf(item) {
  if (graph.timing === "work" || !item.us) return "";
  const share = ((100 * item.us) / view.total).toFixed(1);
  return `${timeInWords(item.us)}, ${share}% of the call${graph.timing === "estimated" ? " (estimated from its region)" : ""}`;
}

function factsOfBox(item) {
  if (item.kind === "inputs") return [["Inputs of the graph", item.children.map((child) => [child.label, ...child.node.out].join(": "))]];
  const engines = Object.entries(item.engines).map(([engine, part]) => `${engine}: ${part.count} operators${part.us && graph.timing !== "work" ? ", " + timeInWords(part.us) : ""}`);
  const path = item.kind === "module" ? item.id : "";
  return [["Module", path], ["Time", timeOf(item)], ["Operators", operatorsInWords(item)], ["Engines", engines], ["Refused by an engine", item.refused ? `${item.refused} operators` : ""], ["Source", sourcesOf(item)]];
}

function operatorsIn(box) {
  return box.children.flatMap((child) => (child.children ? operatorsIn(child) : child.kind === "operator" ? [child] : []));
}

// The first source lines of the operators in a box.
function sourcesOf(box) {
  const found = [...new Set(operatorsIn(box).map((item) => item.node.source).filter(Boolean))];
  return found.length > MOST_LINES ? [...found.slice(0, MOST_LINES), `and ${found.length - MOST_LINES} more lines`] : found;
}

function factsOfOperator(item) {
  const node = item.node;
  if (item.kind === "input") return [["Input of the graph", node.name], ["Value", node.out], ["Size", bytesInWords(node.bytes)]];
  const valueOf = (name) => {
    const from = tree.operators.get(name)?.node.out ?? graph.constants[name];
    const shown = graph.called[name] || name;
    return from && from.length ? `${shown}: ${from.join(", ")}` : shown;
  };
  if (item.kind === "output") return [[node.in.length > 1 ? "Outputs of the graph" : "Output of the graph", node.in.map(valueOf)]];
  const region = graph.regions[node.region];
  const kernels = (node.kernels || []).map((index) => {
    const kernel = graph.kernels[index];
    const shared = kernel.nodes > 1 ? `, fused with ${kernel.nodes - 1} other operators` : "";
    return `${kernel.name}: ${timeInWords(kernel.us)}${kernel.rate ? ", " + kernel.rate : ""}${shared}`;
  });
  return [
    ["Operator", node.op],
    ["Name", node.name],
    ["Module", node.module],
    ["Engine", node.engine + (node.device ? ` on ${node.device}` : "")],
    ["Time", timeOf(item)],
    ["Kernel", kernels],
    ["Refused", node.refused],
    ["Source", node.source],
    ["Inputs", node.in.map(valueOf)],
    ["Output", node.out.length ? [...node.out, bytesInWords(node.bytes)] : []],
    ["Work", node.work],
    ["Region", region ? `${node.region}: ${region.about}` : "runs outside any region"],
    ["Region's cost", region ? region.cost : ""],
    ["Region not run by", region ? region.refused : []],
    ["Kernels of the region", region && !kernels.length ? shortened(region.kernels, 600) : ""],
  ];
}

// Lists the slowest operators in a box.
function slowest(panel, box) {
  if (!box.us) return;
  const timed = graph.timing !== "work";
  const found = operatorsIn(box).sort((a, b) => b.us - a.us);
  panel.append("h4").text(timed ? "Slowest operators" : "Operators with most work");
  const list = panel.append("div").attr("class", "slowest");
  for (const item of found.slice(0, 8).filter((each) => (timed ? each.us >= 0.05 : each.us))) {
    const line = list.append("button").attr("title", item.node.module).on("click", () => select(item));
    line.append("b").text(timed ? timeInWords(item.us) : `${((100 * item.us) / view.total).toFixed(1)}%`);
    line.append("span").text(shortName(item.node.op));
    line.append("small").text(item.node.module);
  }
}
