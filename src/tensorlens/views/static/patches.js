// A picture with its patches coloured by one row of the map.

class PatchOverlay {
  constructor(lens) {
    this.lens = lens;
    this.grid = lens.data.grid;
    this.canvas = element("canvas", {
      class: "patches",
      width: this.grid.columns,
      height: this.grid.rows,
      tabindex: "0",
      role: "application",
      "aria-roledescription": "patch map",
      "aria-label": `Picture of ${this.grid.rows} by ${this.grid.columns} patches. Arrow keys move between patches.`,
    });
    this.frame = element("div", { class: "patch-frame", hidden: "" });
    const picture = lens.data.image ? [element("img", { src: lens.data.image, alt: "The input picture", draggable: "false" })] : [];
    const stage = element("div", { class: "stage" }, [...picture, this.canvas, this.frame]);
    if (!picture.length) stage.style.aspectRatio = `${this.grid.columns} / ${this.grid.rows}`;
    this.slider = element("input", { type: "range", min: "0", max: "100", value: "90", "aria-label": "Opacity of the overlay" });
    const control = element("label", { class: "control" }, [element("span", { text: "Overlay" }), this.slider]);
    this.node = element("div", { class: "picture" }, picture.length ? [stage, control] : [stage]);
    this.listen();
  }

  listen() {
    const cell = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const inside = (part, n) => Math.min(Math.max(Math.floor(part * n), 0), n - 1);
      const column = inside((event.clientX - box.left) / box.width, this.grid.columns);
      const row = inside((event.clientY - box.top) / box.height, this.grid.rows);
      return { i: this.lens.cursor.i, j: this.grid.first + row * this.grid.columns + column };
    };
    this.slider.addEventListener("input", () => this.paint());
    this.canvas.addEventListener("pointermove", (event) => this.lens.hover(cell(event), event));
    this.canvas.addEventListener("pointerleave", () => this.lens.hover(null));
    this.canvas.addEventListener("click", (event) => {
      const { i, j } = cell(event);
      this.lens.select(this.lens.hasOneText ? { i: j, j } : { i, j });
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.grid.columns, ArrowDown: this.grid.columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const { first, rows, columns } = this.grid;
    const { i, j } = this.lens.cursor;
    const inside = Math.min(Math.max(j, first), first + rows * columns - 1);
    const next = inside + step;
    if (next >= first && next < first + rows * columns) this.lens.select({ i, j: next });
  }

  // The score of full colour: the largest of a patch. A class token beside them may be many times larger.
  limit() {
    const { lens, grid } = this;
    let limit = 0;
    for (let k = 0; k < grid.rows * grid.columns; k++) {
      const size = Math.abs(lens.scores.at(lens.cursor.i, grid.first + k));
      if (size > limit && size !== Infinity) limit = size;
    }
    return limit || lens.scores.scaleOf(lens.cursor.i, true);
  }

  paint() {
    const { lens, grid } = this;
    const limit = this.limit();
    const pen = this.canvas.getContext("2d");
    const image = pen.createImageData(grid.columns, grid.rows);
    const opacity = lens.data.image ? Number(this.slider.value) / 100 : 1;
    for (let k = 0; k < grid.rows * grid.columns; k++) {
      const share = lens.scores.at(lens.cursor.i, grid.first + k) / limit;
      // A patch covers the picture by the size of its score; one without a value, wholly.
      const strength = share !== share ? 1 : Math.min(Math.abs(share), 1);
      const alpha = lens.data.image ? opacity * strength : 1;
      image.data.set([...lens.colours.rgb(share), Math.round(255 * alpha)], 4 * k);
    }
    pen.putImageData(image, 0, 0);
  }

  mark() {
    const j = this.lens.hovered?.j ?? this.lens.cursor.j;
    const k = j - this.grid.first;
    this.frame.hidden = k < 0 || k >= this.grid.rows * this.grid.columns;
    const percent = (part, n) => `${(100 * part) / n}%`;
    Object.assign(this.frame.style, {
      left: percent(k % this.grid.columns, this.grid.columns),
      top: percent(Math.floor(k / this.grid.columns), this.grid.rows),
      width: percent(1, this.grid.columns),
      height: percent(1, this.grid.rows),
    });
  }
}
