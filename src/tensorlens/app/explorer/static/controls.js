// The controls of a panel. Each is made once, shows the state it is given, and calls back with what changed.

const { element, visible, shorten, button } = window.TensorLens;

export function field(label, node, extra = "") {
  return element("label", { class: `field ${extra}` }, [element("span", { class: "label", text: label }), node]);
}

export function group(label, node, extra = "") {
  return element("div", { class: `field ${extra}`, role: "group", "aria-label": label }, [element("span", { class: "label", text: label }), node]);
}

export function choice(label, options, change) {
  const select = element("select", { "aria-label": label });
  const families = new Map();
  for (const { name, title = name, family = "" } of options) {
    if (!families.has(family)) families.set(family, []);
    families.get(family).push(element("option", { value: name, text: visible(title) }));
  }
  const isGrouped = families.size > 1;
  for (const [family, nodes] of families) select.append(...(isGrouped ? [element("optgroup", { label: family }, nodes)] : nodes));
  select.addEventListener("change", () => change(select.value));
  return { node: select, show: (value) => (select.value = value) };
}

// Methods by the question they answer; methods that are not derived from T are listed apart.
export function methodChoice(methods, change) {
  const options = methods.map(({ name, title, is_of_tensor: isOfTensor }) => ({ name, title, family: isOfTensor ? "Maps of T" : `Not derived from T: ${name.split(".")[0]}` }));
  return choice("Method", options, change);
}

// Make the controls in a node anew; the one with the same name keeps the focus.
function renew(node, controls) {
  const nameOf = (one) => one.getAttribute("aria-label") ?? one.textContent;
  const name = node.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  node.replaceChildren(...controls);
  if (name !== null) [...node.querySelectorAll("button")].find((one) => nameOf(one) === name)?.focus();
}

const MOST_CHIPS = 3; // the others are offered while typing

// Names in a row, of which one may be chosen; choosing it again clears the choice.
function chips(label, change) {
  const node = element("div", { class: "chips", role: "group", "aria-label": label });
  const show = (candidates, chosen, nothing) => {
    const isChosen = (one) => chosen !== null && (one.index ?? one.name) === (chosen.index ?? chosen.name);
    const known = chosen === null || candidates.some(isChosen) ? candidates : [chosen, ...candidates];
    const none = chip({ name: nothing }, chosen === null, () => change(null));
    none.classList.add("none");
    renew(node, [none, ...known.map((one) => chip(one, isChosen(one), () => change(isChosen(one) ? null : one)))]);
  };
  return { node, show };
}

function chip({ name, probability }, isPressed, act) {
  const node = element("button", { type: "button", class: "chip", "aria-pressed": String(isPressed) }, [element("bdi", { text: shorten(visible(name), 28) })]);
  if (probability !== undefined) node.append(element("span", { class: "share", text: percent(probability) }));
  node.addEventListener("click", act);
  return node;
}

export function percent(share) {
  const size = Math.abs(100 * share);
  return size < 0.1 ? "< 0.1 %" : `${share < 0 ? "−" : ""}${size.toFixed(size < 9.95 ? 1 : 0)} %`;
}

// The target: one of the model's own predictions, a token that is typed in, or the difference of two.
export function targets(change) {
  const first = chips("Explain", (pick) => change({ target: pick, against: null }));
  const second = chips("Rather than", (pick) => change({ against: pick, ...(pick === null ? {} : { target: shown }) }));
  let shown = null;
  const id = `tokens-${Math.random().toString(36).slice(2)}`;
  const known = element("datalist", { id });
  const free = (label, take) => {
    const node = element("input", { type: "text", class: "other", placeholder: "another…", "aria-label": label, list: id, maxlength: "100" });
    node.addEventListener("change", () => {
      if (node.value) take({ index: null, name: node.value });
      node.value = "";
    });
    return node;
  };
  const other = free("Another token to explain", (target) => change({ target, against: null }));
  const less = free("Another token to compare with", (against) => change({ against, target: shown }));
  const explain = group("Explain", element("div", { class: "chip-row" }, [first.node, other, known]));
  const rather = group("Rather than", element("div", { class: "chip-row" }, [second.node, less]));
  // `implied` is the target if nothing was chosen: the model's own prediction.
  const show = (view, { predictions, tokens, output, implied }) => {
    explain.hidden = !predictions.length;
    rather.hidden = !predictions.length || (view.target ?? implied) === null;
    const where = tokens[output] === undefined ? "" : ` after “${shorten(visible(tokens[output]), 20).trim()}”`;
    explain.firstChild.textContent = `Explain a prediction${where}`;
    known.replaceChildren(...predictions.map(({ name }) => element("option", { value: name })));
    first.show(predictions.slice(0, MOST_CHIPS), view.target ?? implied, "the output state");
    const others = predictions.filter((one) => one.index !== (view.target ?? implied)?.index);
    second.show(others.slice(0, MOST_CHIPS), view.against, "nothing else");
    shown = view.target ?? implied;
  };
  return { nodes: [explain, rather], show };
}

// Two thumbs on one track: the first block, and the last.
export function blockRange(change) {
  const thumb = (label) => element("input", { type: "range", min: "0", step: "1", "aria-label": label });
  const [low, high] = [thumb("First block"), thumb("Last block")];
  const track = element("div", { class: "track" });
  const text = element("output", { class: "range-text" });
  const node = element("div", { class: "dual" }, [element("div", { class: "rails" }, [track, low, high]), text]);
  let n = 1;
  const paint = () => {
    const [a, b] = [Number(low.value), Number(high.value)];
    const last = Math.max(n - 1, 1);
    Object.assign(track.style, { left: `${(100 * a) / last}%`, right: `${100 - (100 * b) / last}%` });
    text.textContent = a === 0 && b === n - 1 ? `all ${n}` : a === b ? `block ${a}` : `${a} to ${b}`;
  };
  const limit = (moved) => {
    if (moved === low && Number(low.value) > Number(high.value)) low.value = high.value;
    if (moved === high && Number(high.value) < Number(low.value)) high.value = low.value;
    paint();
  };
  for (const input of [low, high]) {
    input.addEventListener("input", () => limit(input));
    input.addEventListener("change", () => {
      const range = [Number(low.value), Number(high.value) + 1];
      change({ blocks: range[0] === 0 && range[1] === n ? null : range });
    });
  }
  const show = (view, nBlocks) => {
    n = nBlocks;
    for (const input of [low, high]) input.max = String(n - 1);
    const [start, stop] = view.blocks ?? [0, n];
    low.value = String(start);
    high.value = String(stop - 1);
    paint();
  };
  return { node, show };
}

function closeByEscapeOrOutside(node) {
  let open = null;
  const summary = node.querySelector("summary");
  // At the click, not at the toggle, which browsers report later: a key pressed in between would be lost.
  summary.addEventListener("click", () => {
    if (node.open) return;
    open?.abort();
    open = new AbortController();
    const { signal } = open;
    document.addEventListener("pointerdown", (event) => !event.composedPath().includes(node) && (node.open = false), { signal });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      node.open = false;
      summary.focus();
    }, { signal });
  });
  node.addEventListener("toggle", () => node.open || open?.abort());
}

// Every head as a small square; a click leaves it out, a click on the block's number all of its heads.
export function headGrid(change) {
  const summary = element("summary", { text: "all heads" });
  const grid = element("div", { class: "heads" });
  const legend = element("p", { class: "hint head-legend" }, [element("i", { class: "head", "aria-hidden": "true" }), " kept ", element("i", { class: "head out", "aria-hidden": "true" }), " left out. Rows are blocks, columns heads; a block’s number stands for all of its heads."]);
  const tools = element("div", { class: "head-tools" });
  const node = element("details", { class: "head-box" }, [summary, element("div", { class: "popover" }, [tools, legend, grid])]);
  closeByEscapeOrOutside(node);
  const toggle = (view, block, heads) => {
    const left = new Set(view.heads[block] ?? []);
    const isOut = heads.every((head) => left.has(head));
    for (const head of heads) isOut ? left.delete(head) : left.add(head);
    const chosen = { ...view.heads, [block]: [...left].sort((a, b) => a - b) };
    if (!left.size) delete chosen[block];
    change({ heads: chosen });
  };
  const cell = (view, block, head) => {
    const isOut = (view.heads[block] ?? []).includes(head);
    const square = element("button", { type: "button", class: "head", "aria-pressed": String(!isOut), "aria-label": `Block ${block}, head ${head}`, title: `block ${block}, head ${head}` });
    square.addEventListener("click", () => toggle(view, block, [head]));
    return square;
  };
  const show = (view, nHeads) => {
    const count = Object.values(view.heads).reduce((sum, list) => sum + list.length, 0);
    summary.textContent = count ? `${count} left out` : "all heads";
    const [start, stop] = view.blocks ?? [0, nHeads.length];
    const rows = nHeads.slice(start, stop).map((n, k) => {
      const block = start + k;
      const name = button(String(block), `All heads of block ${block}`, () => toggle(view, block, Array.from({ length: n }, (_, h) => h)));
      return element("div", { class: "head-row" }, [name, ...Array.from({ length: n }, (_, head) => cell(view, block, head))]);
    });
    const most = Math.max(...nHeads.slice(start, stop), 0);
    const names = Array.from({ length: most }, (_, head) => element("span", { class: "head-name", text: String(head) }));
    renew(grid, [element("div", { class: "head-row" }, [element("span", { class: "head-name first" }), ...names]), ...rows]);
    const every = Object.fromEntries(nHeads.map((n, block) => [block, Array.from({ length: n }, (_, h) => h)]).filter(([block, list]) => list.length && block >= start && block < stop));
    renew(tools, [button("All", "Keep all heads", () => change({ heads: {} })), button("None", "Leave all heads out", () => change({ heads: every }))]);
    node.hidden = !nHeads.some((n) => n > 0);
  };
  return { node, show };
}
