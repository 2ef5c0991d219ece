"use strict";
const model = JSON.parse(document.getElementById("model").textContent);
const at = (id) => document.getElementById(id);

// Values of a textarea; more than so many would make the page slow.
const MOST_SHOWN = 2000;
const MOST_LISTED = 20;

function add(parent, name, text, attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  Object.assign(element, attributes);
  parent.append(element);
  return element;
}

function describe(tensor) {
  return `${tensor.datatype} [${tensor.shape.map((size) => (size < 0 ? "any" : size)).join(", ")}]`;
}

at("name").textContent = model.name;
at("facts").textContent = model.facts.join(" · ");
for (const [direction, tensors] of [["takes", model.inputs], ["gives", model.outputs]])
  for (const tensor of tensors) {
    const row = add(at("tensors"), "tr", "");
    for (const text of [direction, tensor.name, describe(tensor)]) add(row, "td", text);
  }

// Inputs of the form, by name: the shape and the values; values of large tensors stay those of the sample.
const fields = new Map();

function showInputs(sample) {
  for (const tensor of sample.inputs) {
    const label = add(at("inputs"), "label", `${tensor.name}: ${tensor.datatype} `);
    const shape = add(label, "input", "", { name: `shape of ${tensor.name}`, value: JSON.stringify(tensor.shape) });
    const data = add(label, "textarea", "", { name: tensor.name });
    const isLarge = tensor.data.length > MOST_SHOWN;
    data.value = isLarge ? `the sample's ${tensor.data.length} values` : JSON.stringify(tensor.data);
    data.disabled = shape.disabled = isLarge;
    fields.set(tensor.name, { tensor, shape, data });
  }
}

// A text, or ids of tokens as a JSON list.
function showPrompt() {
  const label = add(at("inputs"), "label", "Prompt: a text, or token ids such as [1, 2, 3]");
  add(label, "textarea", "[1, 2, 3]", { id: "prompt" });
}

function request() {
  if (model.generates) {
    const text = at("prompt").value;
    return { model: model.name, prompt: text.startsWith("[") ? JSON.parse(text) : text, max_tokens: 32, temperature: 0 };
  }
  return {
    inputs: [...fields.values()].map(({ tensor, shape, data }) =>
      data.disabled ? tensor : { ...tensor, shape: JSON.parse(shape.value), data: JSON.parse(data.value) }),
  };
}

function shorten(output) {
  const more = output.data.length > MOST_LISTED ? ", ..." : "";
  return `${output.name}: ${describe(output)} = [${output.data.slice(0, MOST_LISTED).join(", ")}${more}]`;
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = at("form").querySelector("button");
  button.disabled = true;
  at("answer").textContent = at("answer").className = "";
  try {
    const body = JSON.stringify(request());
    const start = performance.now();
    const path = model.generates ? "v1/completions" : `v2/models/${encodeURIComponent(model.name)}/infer`;
    const response = await fetch(path, { method: "POST", body });
    const text = await response.text();
    at("took").textContent = `${(performance.now() - start).toFixed(1)} ms, status ${response.status}`;
    const answer = JSON.parse(text.replace(/\b(NaN|-?Infinity)\b/g, '"$1"'));
    at("answer").className = response.ok ? "" : "wrong";
    if (!response.ok) at("answer").textContent = answer.error.message ?? answer.error;
    else at("answer").textContent = model.generates ? answer.choices[0].text : answer.outputs.map(shorten).join("\n");
  } catch (error) {
    at("answer").className = "wrong";
    at("answer").textContent = `${error}`;
  } finally {
    button.disabled = false;
  }
});

const times = [];

async function showLatency() {
  try {
    const told = await (await fetch("page/latency")).json();
    if (told.p50_ms === undefined) return;
    at("latency").textContent =
      `p50 ${told.p50_ms.toFixed(2)} ms, p99 ${told.p99_ms.toFixed(2)} ms over the last ${told.count} requests of one replica`;
    times.push(told.p50_ms);
    if (times.length > 60) times.shift();
    const most = Math.max(...times);
    at("line").setAttribute("points", times.map((ms, n) => `${(n * 100) / 59},${20 - (18 * ms) / most}`).join(" "));
  } catch {
    at("latency").textContent = "the server does not answer";
  }
}

at("plan").addEventListener("toggle", () => {
  if (at("plan").open && !at("plan").querySelector("iframe")) add(at("plan"), "iframe", "", { src: "page/plan", title: "plan" });
});

if (model.generates) showPrompt();
else fetch("page/sample").then((response) => response.json()).then(showInputs);
setInterval(showLatency, 2000);
showLatency();
