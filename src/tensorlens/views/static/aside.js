// Inputs outside the colour scale and the part of an attention sink: a switch, and bars on the scale of the others.

class Aside {
  constructor(lens) {
    this.lens = lens;
    this.columns = lens.data.setAside.length ? lens.data.setAside : [0];
    this.list = element("ol", { class: "ranking" });
    const title = element("h3", { text: lens.data.sums.length ? "In the sum, not in the colours" : "Not in the colours" });
    this.node = element("section", { class: "aside", hidden: "" }, [title, this.list]);
    this.control = this.buildSwitch();
  }

  buildSwitch() {
    const { lens } = this;
    const isTold = lens.data.sink.length && !lens.data.setAside.length; // a sink that is beside the inputs already
    if (lens.data.grid || lens.nIn < 3 || isTold) return null;
    const names = this.columns.slice(0, 3).map((j) => `“${shorten(visible(lens.data.inTokens[j]), 16).trim()}”`);
    const more = this.columns.length > 3 ? " …" : "";
    return checkbox(`Set aside ${names.join(", ")}${more}`, lens.scores.aside.size > 0, (isOn) => {
      lens.scores.setAside(isOn ? this.columns : []);
      lens.paint();
    });
  }

  // On the scale of the inputs above; a bar that would be longer than its track is broken.
  update(zero, span, limit) {
    const { lens } = this;
    const { i } = lens.cursor;
    const columns = lens.scores.aside.size ? this.columns.slice(0, 8) : [];
    const named = columns.map((j) => ({ j, score: lens.scores.at(i, j) }));
    if (lens.data.sink.length) named.push({ j: null, name: "attention sink", score: lens.data.sink[i] });
    this.node.hidden = named.length === 0;
    this.list.replaceChildren(...named.map(({ j, name, score }) => {
      const room = score < 0 ? zero : 1 - zero;
      const share = Math.max(-zero * span, Math.min(score / limit, (1 - zero) * span)) || 0;
      const line = rankingLine(lens, { j, name, score, share }, zero, span, limit);
      const fill = line.querySelector(".fill");
      fill.style.background = "var(--muted)";
      fill.classList.toggle("broken", Math.abs(score / limit) / span > room + 0.005);
      return line;
    }));
  }
}

function checkbox(label, isOn, act) {
  const input = element("input", { type: "checkbox", "aria-label": label });
  input.checked = isOn;
  input.addEventListener("change", () => act(input.checked));
  return element("label", { class: "control switch" }, [input, element("span", { text: label })]);
}
