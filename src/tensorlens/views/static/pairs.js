// A similarity as a sum over pairs: two texts side by side, and the matrix. A token that is pointed at or clicked lights
// up its partners in the other text; without one, each token has the colour of its sum over the other text.

class Pairs {
  constructor(host, data) {
    Object.assign(this, { host, data, pinned: null });
    this.root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
    this.limit = Math.max(...this.inner().flat().map((score) => Math.abs(score ?? 0))) || 1;
    this.build();
    onShadeChange(() => this.reshade());
    this.reshade();
    this.show(null);
  }

  // Scores without the biases.
  inner() {
    return this.data.cells.slice(0, -1).map((row) => row.slice(0, -1));
  }

  build() {
    const { data } = this;
    const header = heading(visible(data.title));
    this.third = data.columns.length - 1 - data.nAgainst;
    this.sides = data.sides.map((name, k) => this.buildText(name, k));
    this.tokens = [[], []];
    this.sides.forEach(({ axis, spans }) => this.tokens[axis].push(...spans));
    this.tip = element("p", { class: "tip", role: "status", "aria-live": "polite" });
    this.partners = element("ol", { class: "partners", "aria-label": "Strongest pairs" });
    const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": "Score of each pair of tokens, biases last" });
    const left = 12 + 6 * Math.min(14, Math.max(...data.rows.map((name) => visible(name).length)));
    this.grid = new Grid(canvas, { rows: data.rows.map((name) => shorten(visible(name), 14)), columns: data.columns.map(visible), isSlanted: true, left });
    this.grid.onPoint = (row, column) => (this.tip.textContent = this.pairText(row, column));
    this.grid.onPick = (row, column) => this.pick(row < data.rows.length - 1 ? [0, row] : column < data.columns.length - 1 ? [1, column] : null);
    const matrix = element("section", { class: "figure" }, [element("h3", { text: "Every pair: first text down, second across" }), canvas, (this.scale = element("p", { class: "scales" }))]);
    const list = element("section", {}, [element("h3", { text: "Strongest pairs" }), this.partners]);
    const texts = element("div", { class: "texts" }, this.sides.map((side) => side.node));
    const style = element("style", { text: STYLE + PAIRS_STYLE });
    this.root.replaceChildren(style, element("div", { class: "lens pairs" }, [header, texts, this.tip, element("div", { class: "below" }, [list, matrix]), captionList(data.caption)]));
  }

  buildText(name, side) {
    const axis = Math.min(side, 1);
    const labels = axis ? this.data.columns : this.data.rows;
    const start = side === 2 ? this.third : 0;
    const stop = side === 1 ? this.third : labels.length - 1;
    const heading = side === 2 ? `${name}: its pairs count negatively` : name;
    const spans = labels.slice(start, stop).map((label, k) => {
      const span = element("button", { class: "token", type: "button", "aria-pressed": "false", text: visible(label.trim() || label) });
      span.addEventListener("pointerenter", () => this.show([axis, start + k]));
      span.addEventListener("pointerleave", () => this.show(this.pinned));
      span.addEventListener("focus", () => this.show([axis, start + k]));
      span.addEventListener("click", () => this.pick([axis, start + k]));
      return span;
    });
    const tokens = element("p", { class: "tokens", dir: directionOf(labels) }, spans);
    const pictures = new Pictures(this.data.pictures[side], (k) => this.pick([axis, k]));
    // Patches are in the picture; other tokens, such as a class token, are beside it.
    spans.forEach((span, k) => (span.hidden = pictures.holds(start + k) >= 0));
    const parts = pictures.pictures.length ? [pictures.node, tokens] : [tokens];
    return { axis, spans, pictures, node: element("section", {}, [element("h3", { text: heading }), ...parts]) };
  }

  pick(place) {
    const isSame = place && this.pinned && place.join() === this.pinned.join();
    this.pinned = isSame ? null : place;
    this.tokens.forEach((spans, axis) => spans.forEach((span, k) => span.setAttribute("aria-pressed", `${this.pinned?.join() === `${axis},${k}`}`)));
    this.show(this.pinned);
  }

  score(axis, k, other) {
    return axis ? this.data.cells[other][k] : this.data.cells[k][other];
  }

  // Partners of one token, or the score of every token with all of the other text.
  show(place) {
    this.shown = place;
    const colours = new Colours(true, this.shade);
    const sums = this.tokens.map((spans, axis) => spans.map((_, k) => this.tokens[1 - axis].reduce((sum, _, other) => sum + (this.score(axis, k, other) ?? 0), 0)));
    const most = Math.max(...sums.flat().map(Math.abs)) || 1;
    this.tokens.forEach((spans, axis) => spans.forEach((span, k) => {
      const isChosen = place && axis === place[0];
      const share = !place ? sums[axis][k] / most : isChosen ? 0 : (this.score(axis, k, place[1]) ?? 0) / this.limit;
      span.classList.toggle("chosen", Boolean(isChosen && k === place[1]));
      span.style.backgroundColor = colours.css(Math.max(-1, Math.min(1, share)));
      span.style.color = colours.inkOn(Math.max(-1, Math.min(1, share)));
    }));
    for (const { axis, pictures } of this.sides) {
      pictures.paint((k) => (!place ? sums[axis][k] : axis === place[0] ? 0 : this.score(axis, k, place[1]) ?? 0), colours, place && axis === place[0] ? place[1] : null);
    }
    this.list(place);
    this.grid.mark = place && (place[0] ? [this.best(place), place[1]] : [place[1], this.best(place)]);
    this.grid.draw(this.data.cells, this.shade, this.limit);
    this.scale.replaceChildren(scaleOf("", this.limit, this.shade));
    this.tip.textContent = place
      ? `“${this.name(...place)}” contributes ${formatNumber(sums[place[0]][place[1]], true)} over all tokens of the other side.${this.pinned ? "" : " Click to keep it."}`
      : `${WARM[this.shade]} makes them similar, blue less so: the contribution of each token, over all tokens of the other side. Point at one to see its partners; click to keep it.`;
  }

  name(axis, k) {
    const isThird = axis && this.data.nAgainst && k >= this.third && k < this.data.columns.length - 1;
    return visible((axis ? this.data.columns : this.data.rows)[k].trim()) + (isThird ? ` (${this.data.sides[2].toLowerCase()})` : "");
  }

  strongest([axis, k]) {
    const others = this.tokens[1 - axis].map((_, other) => other);
    return others.sort((x, y) => Math.abs(this.score(axis, k, y) ?? 0) - Math.abs(this.score(axis, k, x) ?? 0));
  }

  best(place) {
    return this.strongest(place)[0];
  }

  list(place) {
    const pairs = place ? this.strongest(place).slice(0, 8).map((other) => (place[0] ? [other, place[1]] : [place[1], other])) : this.data.top;
    this.partners.replaceChildren(...pairs.map(([row, column]) => element("li", {}, [
      element("span", { class: "number", text: formatNumber(this.data.cells[row][column] ?? NaN, true, this.limit) }),
      element("span", { text: ` ${this.name(0, row)} × ${this.name(1, column)}` }),
    ])));
  }

  pairText(row, column) {
    return `${this.name(0, row)} × ${this.name(1, column)}: ${formatNumber(this.data.cells[row][column] ?? NaN, true)}`;
  }

  reshade() {
    this.shade = shadeAround();
    this.host.dataset.shade = this.shade;
    this.show(this.shown ?? null);
  }
}
