// A graph as a tree of boxes: modules hold modules and operators. Repeated blocks and long runs of operators are gathered in boxes too.
"use strict";

const MOST_IN_A_BOX = 60; // more children are gathered in boxes of PER_CHUNK
const PER_CHUNK = 30;
const MOST_ENDS = 8; // more inputs or outputs are gathered in one box

/* Returns {root, boxes, operators}: modules and other boxes by id; operators, graph inputs and outputs by name. If `views` is false, views are left
   out, and their outputs count as values of their inputs. */
function buildTree(graph, views) {
  const operators = new Map();
  const root = { id: "", kind: "module", label: "", className: "", children: [], parent: null };
  const boxes = new Map([["", root]]);
  for (const [path, className, parent] of graph.modules) {
    const inside = boxes.get(parent) || root;
    const label = parent && path.startsWith(parent + ".") ? path.slice(parent.length + 1) : path;
    const box = { id: path, kind: "module", label, className, children: [], parent: inside };
    boxes.set(path, box);
  }
  const placed = new Set();
  const place = (box) => { // a module stands at the place of its first operator
    if (box === root || placed.has(box)) return;
    placed.add(box);
    place(box.parent);
    box.parent.children.push(box);
  };
  let above = root;
  if (graph.inputs.length > MOST_ENDS) {
    above = { id: "=(inputs)", kind: "inputs", label: `${graph.inputs.length} inputs`, className: "", children: [], parent: root };
    boxes.set(above.id, above);
    root.children.push(above);
  }
  graph.inputs.forEach((input, i) => {
    const label = graph.called[input.name] || (/^(arg|primals_|tangents_)\d/.test(input.name) ? `input ${i + 1}` : input.name);
    const item = { id: "=" + input.name, kind: "input", label, node: input, parent: above };
    operators.set(input.name, item);
    above.children.push(item);
  });
  for (const node of graph.nodes) {
    const box = boxes.get(node.module) || root;
    const item = { id: "=" + node.name, kind: "operator", label: shortName(node.op), node, parent: box };
    operators.set(node.name, item);
    if (node.view && !views) {
      box.hidden = (box.hidden || 0) + 1;
      continue;
    }
    place(box);
    box.children.push(item);
  }
  const output = (name, label, values) => {
    const item = { id: "=" + name, kind: "output", label, node: { name, in: values, out: values.flatMap((value) => operators.get(value)?.node.out || []) }, parent: root };
    operators.set(name, item);
    root.children.push(item);
  };
  const { outputs } = graph;
  if (outputs.length > MOST_ENDS) output("(outputs)", `${outputs.length} outputs`, outputs);
  else outputs.forEach((value, i) => output(`(output ${i + 1})`, outputs.length > 1 ? `output ${i + 1}` : "output", [value]));
  simplify(root, boxes);
  measure(root);
  return { root, boxes, operators };
}

function shortName(op) {
  const parts = op.split(".");
  return parts.length > 1 ? parts[1] : op;
}

// Simplifies a box, its children first: a module of one operator becomes that operator; repeated blocks and long runs are gathered.
function simplify(box, boxes) {
  for (const child of box.children) if (child.children) simplify(child, boxes);
  box.children = box.children.map((child) => {
    if (!child.children || child.children.length !== 1 || child.children[0].children) return child;
    const only = child.children[0];
    boxes.set(child.id, only);
    const label = only.named ? child.label + "." + only.label : child.label;
    return Object.assign(only, { label, named: true, hidden: (only.hidden || 0) + (child.hidden || 0), className: only.className || child.className, parent: box });
  });
  if (box.kind === "inputs") return;
  box.children = gatherRepeated(box, boxes);
  if (box.children.length > MOST_IN_A_BOX) box.children = gatherChunks(box, boxes);
}

// Blocks repeat if they have the same class and the same modules; without modules, the same operators. Operators between modules may differ, as the
// first block computes what all blocks share.
function signature(item) {
  if (!item.children) return (item.named ? item.className : "") + item.node.op;
  if (!item.signature) {
    const modules = item.children.filter((child) => child.children || child.named);
    const parts = modules.length ? modules : item.children;
    item.signature = `${item.className}(${parts.map(signature).join()})`;
  }
  return item.signature;
}

function gather(box, boxes, members, facts) {
  const made = Object.assign({ id: box.id + "/" + members[0].id + "…", children: members, parent: box }, facts);
  for (const member of members) member.parent = made;
  boxes.set(made.id, made);
  return made;
}

function gatherRepeated(box, boxes) {
  const found = [];
  for (let i = 0; i < box.children.length; ) {
    const first = box.children[i];
    let end = i + 1;
    if (first.children && box.kind !== "repeat")
      while (end < box.children.length && box.children[end].children && signature(box.children[end]) === signature(first)) end++;
    const members = box.children.slice(i, end);
    i = end;
    if (members.length < 2 || members.length === box.children.length && !box.parent) { found.push(...members); continue; }
    const last = members[members.length - 1].label;
    let common = 0;
    while (common < last.length && last[common] === first.label[common] && !/\d/.test(last[common])) common++;
    const label = first.label + "–" + last.slice(common);
    const made = gather(box, boxes, members, { kind: "repeat", label, className: members.length + " × " + first.className });
    if (members.length > MOST_IN_A_BOX) made.children = gatherChunks(made, boxes);
    found.push(made);
  }
  return found;
}

function gatherChunks(box, boxes) {
  const isInput = (item) => item.kind === "input" || item.kind === "inputs";
  const items = box.children.filter((item) => !isInput(item) && item.kind !== "output");
  const size = Math.max(PER_CHUNK, Math.ceil(items.length / MOST_IN_A_BOX));
  const chunks = [];
  for (let i = 0; i < items.length; i += size) {
    const members = items.slice(i, i + size);
    const label = members.length > 1 ? members[0].label + " … " + members[members.length - 1].label : members[0].label;
    chunks.push(gather(box, boxes, members, { kind: "chunk", label, className: members.length + " in a row" }));
  }
  return [...box.children.filter(isInput), ...chunks, ...box.children.filter((i) => i.kind === "output")];
}

// Sums operators and time of each box, in total and by engine.
function measure(item) {
  item.depth = item.parent ? item.parent.depth + 1 : 0;
  item.us = 0;
  item.count = 0;
  item.engines = {};
  item.refused = 0;
  item.views = item.hidden || 0; // not drawn
  if (!item.children) {
    if (item.kind !== "operator") return;
    item.us = item.node.us || 0;
    item.count = 1;
    item.engines[item.node.engine] = { us: item.us, count: 1 };
    item.refused = item.node.refused ? 1 : 0;
    return;
  }
  for (const child of item.children) {
    measure(child);
    item.us += child.us;
    item.count += child.count;
    item.refused += child.refused;
    item.views += child.views;
    for (const [engine, part] of Object.entries(child.engines)) {
      const own = (item.engines[engine] ??= { us: 0, count: 0 });
      own.us += part.us;
      own.count += part.count;
    }
  }
}

// Unfolds modules, the slowest first, while at most `most` boxes are visible. Repeated blocks stay folded.
function unfoldSome(root, most) {
  setOpen(root, false);
  let seen = root.children.length;
  let next = root.children.filter((child) => child.children);
  while (next.length) {
    next.sort((a, b) => b.us - a.us || a.depth - b.depth);
    const box = next.shift();
    if (box.kind !== "module") continue;
    if (seen + box.children.length - 1 > most) break;
    box.open = true;
    seen += box.children.length - 1;
    next.push(...box.children.filter((child) => child.children));
  }
}

function setOpen(box, open) {
  if (!box.children) return;
  box.open = open || box.parent === null;
  for (const child of box.children) setOpen(child, open);
}

function reveal(item) {
  for (let box = item.parent; box; box = box.parent) box.open = true;
}

function isDrawn(item) {
  for (; item.parent; item = item.parent) if (!item.parent.children.includes(item)) return false;
  return true;
}

function ancestors(item) {
  const found = [];
  for (let box = item.parent; box; box = box.parent) found.push(box);
  return found; // the innermost first
}

/* The edges to draw in unfolded boxes: [{box, from, to, values}]. `from` and `to` are children of the box, or ports: "in:name" where a value enters
   the box, "out:name" where it leaves. */
function visibleEdges(graph, tree) {
  const maker = (name) => { // follows the value back through views that are not drawn
    let item = tree.operators.get(name);
    const shown = item && item.node.out;
    while (item && item.kind === "operator" && !item.parent.children.includes(item) && item.node.in.length) item = tree.operators.get(item.node.in[0]);
    return item && { item, out: shown || [] };
  };
  const found = new Map();
  const add = (box, from, to, value) => {
    if (!box.open || !isShown(box)) return;
    const key = box.id + "\n" + (from.id ?? from) + "\n" + (to.id ?? to);
    if (!found.has(key)) found.set(key, { box, from, to, values: [] });
    const edge = found.get(key);
    if (!edge.values.some((each) => each.name === value.name)) edge.values.push(value);
  };
  for (const item of tree.operators.values()) {
    if (!item.parent.children.includes(item) || !item.node.in) continue;
    for (const name of item.node.in) {
      const made = maker(name);
      if (!made || made.item === item) continue;
      const value = { name, maker: made.item.id, out: made.out, bytes: tree.operators.get(name).node.bytes || 0 };
      connect(made.item, item, value, add);
    }
  }
  return [...found.values()];
}

function isShown(item) {
  return ancestors(item).every((box) => box.open);
}

function connect(from, to, value, add) {
  const above = ancestors(from);
  const below = ancestors(to);
  const meeting = above.find((box) => below.includes(box));
  let a = from;
  for (const box of above) {
    if (box === meeting) break;
    add(box, a, "out:" + from.id, value);
    a = box;
  }
  let b = to;
  for (const box of below) {
    if (box === meeting) break;
    add(box, "in:" + from.id, b, value);
    b = box;
  }
  add(meeting, a, b, value);
}
