// Inputs that take no part in the colours: a switch, and a bar of their own. A decoder's first token is often many times larger than the others.

class Aside {
  constructor(lens) {
    this.lens = lens;
    this.columns = lens.data.setAside.length ? lens.data.setAside : [0];
    this.list = element("ol", { class: "ranking" });
    const title = element("h3", { text: "Set aside: in the sum, not in the colours" });
    this.node = element("section", { class: "aside", hidden: "" }, [title, this.list]);
    this.control = this.buildSwitch();
  }

  buildSwitch() {
    const { lens } = this;
    if (lens.data.grid || lens.nIn < 3) return null;
    const names = this.columns.slice(0, 3).map((j) => `“${shorten(visible(lens.data.inTokens[j]), 16).trim()}”`);
    const more = this.columns.length > 3 ? " …" : "";
    return checkbox(`Set aside ${names.join(", ")}${more}`, lens.scores.aside.size > 0, (isOn) => {
      lens.scores.setAside(isOn ? this.columns : []);
      lens.paint();
    });
  }

  // The longest fills its track: a scale of its own.
  update() {
    const { lens } = this;
    const { i } = lens.cursor;
    this.node.hidden = lens.scores.aside.size === 0;
    const columns = this.columns.slice(0, 8);
    const limit = Math.max(...columns.map((j) => Math.abs(lens.scores.at(i, j)) || 0)) || 1;
    const lines = columns.map((j) => ({ j, score: lens.scores.at(i, j), share: Math.abs(lens.scores.at(i, j) / limit) || 0 }));
    this.list.replaceChildren(...lines.map((line) => rankingLine(lens, line, 0, 1, limit)));
    for (const fill of this.list.querySelectorAll(".fill")) Object.assign(fill.style, { left: "0", background: "var(--muted)" });
  }
}

function checkbox(label, isOn, act) {
  const input = element("input", { type: "checkbox", "aria-label": label });
  input.checked = isOn;
  input.addEventListener("change", () => act(input.checked));
  return element("label", { class: "control switch" }, [input, element("span", { text: label })]);
}
