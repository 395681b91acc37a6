// The small parts beside a map: colour legend, strongest inputs, caption, tooltip and buttons.

function legend() {
  const bar = element("div", { class: "bar" });
  const ticks = element("div", { class: "ticks" });
  const missing = element("div", { class: "missing", hidden: "" }, [element("i"), element("span", { text: "no value" })]);
  const node = element("div", { class: "legend", role: "img" }, [bar, ticks, missing]);
  const update = (lens, limit, contrast, text) => {
    const top = formatNumber(limit / contrast, lens.isSigned);
    const more = contrast > 1 ? "≥ " : "";
    const less = contrast > 1 ? "≤ " : "";
    const ends = lens.isSigned ? [less + formatNumber(-limit / contrast, true), "0", more + top] : ["0", more + top];
    bar.style.background = lens.colours.gradient();
    ticks.replaceChildren(...ends.map((end) => element("span", { text: end })));
    missing.hidden = !lens.scores.hasMissing;
    missing.firstChild.style.background = lens.colours.css(NaN);
    node.setAttribute("aria-label", `Colours of ${text}, from ${ends[0]} to ${ends[ends.length - 1]}`);
  };
  return { node, update };
}

function ranking(lens) {
  const list = element("ol", { class: "ranking" });
  const node = element("section", {}, [element("h3", { text: "Strongest inputs" }), list]);
  const update = () => {
    const { i } = lens.cursor;
    const limit = lens.scores.scaleOf(i, true);
    const lines = lens.scores.strongest(i, 8).map((j) => {
      const score = lens.scores.at(i, j);
      return { j, score, share: Math.max(-1, Math.min(score / limit, 1)) || 0 };
    });
    // The bars share one zero, placed so that the longest on each side just fits, or as in the map beside this one.
    const ends = lens.scores.shared ? [lens.isSigned ? -1 : 0, 1] : lines.map(({ share }) => share);
    const below = -Math.min(0, ...ends);
    const above = Math.max(0, ...ends);
    const span = below + above || 1;
    list.replaceChildren(...lines.map((line) => rankingLine(lens, line, below / span, span, limit)));
    lens.aside.update(below / span, span, limit);
    if (!lines.length) list.append(element("li", { class: "empty", text: "All scores of this output are zero." }));
  };
  return { node, update };
}

function rankingLine(lens, { j, name = null, score, share }, zero, span, limit) {
  const fill = element("i", { class: score < 0 ? "fill below" : "fill" });
  const width = Math.abs(share) / span;
  fill.style.width = `${100 * width}%`;
  fill.style.left = `${100 * (score < 0 ? zero - width : zero)}%`;
  fill.style.background = lens.colours.css(score < 0 ? -0.72 : lens.isSigned ? 0.72 : 0.6);
  const axis = element("i", { class: "zero" });
  axis.style.left = `${100 * zero}%`;
  const line = element("li", {}, [
    element("bdi", { class: "name", text: name ?? shorten(visible(lens.data.inTokens[j]), 28).trim(), title: name ?? `input ${j}` }),
    element("span", { class: "track" }, [axis, fill]),
    element("span", { class: "number", text: formatNumber(score, lens.isSigned, limit) }),
  ]);
  if (j !== null) line.addEventListener("pointermove", (event) => lens.hover({ i: lens.cursor.i, j }, event));
  line.addEventListener("pointerleave", () => lens.hover(null));
  return line;
}

function caption(lens) {
  const line = (name, value) => [element("dt", { text: visible(name) }), value];
  const fixed = lens.data.caption.flatMap(([name, text]) => line(name, element("dd", { text: visible(text) })));
  const byRow = lens.data.rowCaption.map(([name, texts]) => ({ name, texts, value: element("dd") }));
  const rows = byRow.flatMap(({ name, value }) => line(name, value));
  const node = element("dl", { class: "caption" }, [...rows, ...fixed]);
  const update = () => {
    const { i } = lens.cursor;
    for (const { texts, value } of byRow) value.textContent = visible(texts[i] ?? "");
  };
  return { node, update };
}

function tooltip(lens) {
  const pair = element("div", { class: "pair" });
  const number = element("div", { class: "number" });
  const node = element("div", { class: "tooltip", role: "tooltip", hidden: "" }, [number, pair]);
  const name = (token) => element("bdi", { text: `“${shorten(visible(token), 60)}”` });
  const show = (cell, event) => {
    node.hidden = !cell || !event;
    if (node.hidden) return;
    number.textContent = formatNumber(lens.scores.at(cell.i, cell.j), lens.isSigned);
    const { outTokens, inTokens } = lens.data;
    pair.replaceChildren(name(outTokens[cell.i]), ` ${lens.position(cell.i)} ← ${cell.j} `, name(inTokens[cell.j]));
    const box = lens.node.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const overRight = x + node.offsetWidth + 24 > box.width;
    node.style.left = `${Math.max(0, overRight ? x - node.offsetWidth - 12 : x + 14)}px`;
    node.style.top = `${y + 18}px`;
  };
  return { node, show };
}

// What a page is about, facts beside it, and the switch between light and dark. A quoted token keeps its leading space.
function heading(title, ...facts) {
  return element("header", {}, [element("h2", { text: title.replaceAll("“ ", "“\u00a0") }), ...facts, shadeButton()]);
}

function button(text, label, act) {
  const node = element("button", { type: "button", "aria-label": label, title: label, text });
  node.addEventListener("click", act);
  return node;
}
