// Tokens as running text, coloured by one row of the map.

const LONGEST_TOKEN = 160;

class TokenText {
  constructor(lens, tokens, { label, moves, isColoured }) {
    this.lens = lens;
    this.isColoured = isColoured;
    this.moves = moves;
    // Word pieces carry no spaces of their own.
    const isApart = !isColoured || !tokens.some((token) => token.startsWith(" "));
    this.spans = tokens.map((token, k) => this.span(token, k));
    this.node = element("div", {
      class: `text ${moves} ${isColoured ? "row" : "strip"} ${isApart ? "apart" : ""}`,
      role: "listbox",
      tabindex: "0",
      "aria-label": label,
      dir: directionOf(tokens),
    });
    tokens.forEach((token, k) => {
      this.node.append(this.spans[k]);
      if (token.includes("\n")) this.node.append(element("br"));
    });
    this.listen();
  }

  span(token, k) {
    const text = token.includes("\n") ? visible(token) : shorten(visible(token), LONGEST_TOKEN);
    const id = `${this.moves}-${k}`;
    return element("span", { class: "token", role: "option", id, "data-index": k, "aria-selected": "false", text });
  }

  listen() {
    const indexOf = (event) => {
      const index = event.target.dataset?.index;
      return index === undefined ? null : Number(index);
    };
    this.node.addEventListener("pointermove", (event) => {
      const k = indexOf(event);
      this.lens.hover(k === null ? null : this.cellOf(k), event);
    });
    this.node.addEventListener("pointerleave", () => this.lens.hover(null));
    this.node.addEventListener("click", (event) => {
      const k = indexOf(event);
      if (k !== null) this.lens.select(this.clicked(k));
    });
    this.node.addEventListener("keydown", (event) => {
      if (this.lens.moveByKey(event, this.moves)) event.preventDefault();
    });
  }

  // Pointing at a token asks for its score in the selected row; an output strip asks for that output.
  cellOf(k) {
    return this.isColoured ? { i: this.lens.cursor.i, j: k } : { i: k, j: this.lens.cursor.j };
  }

  clicked(k) {
    return this.moves === "out" ? { i: k, j: this.lens.cursor.j } : { i: this.lens.cursor.i, j: k };
  }

  paint() {
    if (!this.isColoured) return;
    const { lens } = this;
    const { aside } = lens.scores;
    for (const span of this.node.querySelectorAll(".aside")) span.classList.remove("aside");
    for (const j of aside) this.spans[j].classList.add("aside");
    this.spans.forEach((span, j) => {
      const share = aside.has(j) ? 0 : lens.scores.share(lens.cursor.i, j, true) * lens.rowContrast;
      span.style.backgroundColor = lens.colours.css(share);
      span.style.color = lens.colours.inkOn(share);
    });
  }

  mark(isMoved) {
    const chosen = this.moves === "out" ? this.lens.cursor.i : this.lens.cursor.j;
    const span = this.spans[chosen];
    if (this.marked !== span) {
      this.marked?.setAttribute("aria-selected", "false");
      span?.setAttribute("aria-selected", "true");
      this.marked = span;
      if (span) this.node.setAttribute("aria-activedescendant", span.id);
    }
    if (isMoved && span) this.scrollTo(span);
    const hovered = this.lens.hovered && this.spans[this.isColoured ? this.lens.hovered.j : this.lens.hovered.i];
    if (this.pointed !== hovered) {
      this.pointed?.classList.remove("pointed");
      hovered?.classList.add("pointed");
      this.pointed = hovered;
    }
  }

  // scrollIntoView would move the notebook as well.
  scrollTo(span) {
    const above = span.offsetTop;
    if (above < this.node.scrollTop || above + span.offsetHeight > this.node.scrollTop + this.node.clientHeight) {
      this.node.scrollTop = above - this.node.clientHeight / 2;
    }
  }
}
