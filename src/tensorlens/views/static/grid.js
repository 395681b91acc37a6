const CELL = 22;

// A small heat map with labels, drawn whole: blocks and heads are few, and tokens scroll.
class Grid {
  constructor(canvas, { rows, columns, isFlipped = false, isSlanted = false, left = 34 }) {
    Object.assign(this, { canvas, rows, columns, isFlipped, isSlanted, left });
    this.bottom = isSlanted ? 74 : 22;
    this.cell = Math.max(4, Math.min(CELL, Math.floor((isSlanted ? 900 : 420) / columns.length)));
    this.height = Math.min(CELL, Math.max(9, Math.floor(420 / rows.length)));
    canvas.addEventListener("pointermove", (event) => this.at(event, this.onPoint));
    canvas.addEventListener("click", (event) => this.at(event, this.onPick));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  at(event, act) {
    const column = Math.floor((event.offsetX - this.left) / this.cell);
    const place = Math.floor(event.offsetY / this.height);
    const row = this.isFlipped ? this.rows.length - 1 - place : place;
    if (act && row >= 0 && row < this.rows.length && column >= 0 && column < this.columns.length) act(row, column);
  }

  key(event) {
    const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.mark || !this.onPick) return;
    const row = this.mark[0] + step[0];
    const column = this.mark[1] + step[1];
    if (row < 0 || row >= this.rows.length || column < 0 || column >= this.columns.length) return;
    event.preventDefault();
    this.onPick(row, column);
    this.onPoint?.(row, column);
  }

  // Scores beyond `most` have the colour of `most`. Columns of different `kinds` have scales of their own.
  draw(cells, shade, most = 0, kinds = null) {
    const { canvas, rows, columns, cell, height, left, bottom } = this;
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [left + cell * columns.length + 8, height * rows.length + bottom];
    Object.assign(canvas, { width: w * ratio, height: h * ratio });
    Object.assign(canvas.style, { width: `${w}px`, height: `${h}px` });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const largest = (kind) => Math.max(0, ...cells.flatMap((line) => line.filter((_, column) => kinds === null || kinds[column] === kind).map((score) => Math.abs(score ?? 0))));
    const own = new Map([...new Set(kinds ?? [null])].map((kind) => [kind, most || largest(kind)]));
    this.limits = [...own];
    const limitOf = (column) => own.get(kinds?.[column] ?? null) || 1;
    const colours = new Colours(true, shade);
    const ink = shade === "dark" ? "#c9d0d8" : "#333a42";
    pen.font = "10px system-ui, sans-serif";
    rows.forEach((name, row) => {
      const y = (this.isFlipped ? rows.length - 1 - row : row) * height;
      cells[row].forEach((score, column) => {
        pen.fillStyle = score === null ? "transparent" : colours.css(Math.max(-1, Math.min(1, score / limitOf(column))));
        pen.fillRect(left + column * cell, y, cell - 0.5, height - 0.5);
      });
      if (height >= 10 || row % 5 === 0) {
        pen.fillStyle = ink;
        pen.textAlign = "right";
        pen.fillText(name, left - 5, y + height / 2 + 3.5);
      }
    });
    this.names(pen, ink, height * rows.length);
    if (this.mark) {
      const y = (this.isFlipped ? rows.length - 1 - this.mark[0] : this.mark[0]) * height;
      pen.strokeStyle = shade === "dark" ? "#6cb6ff" : "#0b6bcb";
      pen.lineWidth = 2;
      pen.strokeRect(left + this.mark[1] * cell, y, cell, height);
    }
  }

  names(pen, ink, y) {
    pen.fillStyle = ink;
    const every = Math.ceil(11 / this.cell);
    this.columns.forEach((name, column) => {
      if (column % every) return;
      pen.save();
      pen.translate(this.left + (column + 0.5) * this.cell, y + 6);
      if (this.isSlanted || name.length > 2) pen.rotate(this.isSlanted ? -Math.PI / 3 : 0);
      pen.textAlign = this.isSlanted ? "right" : "center";
      pen.fillText(shorten(name === "feed-forward" ? "ff" : name, 12), 0, 8);
      pen.restore();
    });
  }
}
