// The matrix as a picture on a canvas: labels, cells, cross-hair, zoom and overview.

const GAP_FROM = 12;
const LABELS_FROM = 9;

class HeatMap {
  constructor(lens) {
    this.lens = lens;
    this.view = new Viewport(lens.nOut, lens.nIn);
    this.base = element("canvas", { class: "base" });
    this.marks = element("canvas", {
      class: "marks",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": `Heat map, ${lens.nOut} outputs by ${lens.nIn} inputs. Arrow keys move, plus and minus zoom, 0 shows all.`,
    });
    this.overview = new Overview(this);
    this.node = element("div", { class: "heatmap" }, [this.base, this.marks, this.overview.node]);
    this.raster = document.createElement("canvas");
    this.listen();
  }

  layout(width) {
    const pen = this.base.getContext("2d");
    pen.font = labelFont(LARGEST_LABEL);
    const longest = (tokens) => Math.max(0, ...tokens.slice(0, 400).map((token) => pen.measureText(axisLabel(token)).width));
    this.left = Math.ceil(Math.min(longest(this.lens.data.outTokens), 118)) + 30;
    this.top = Math.ceil(Math.min(longest(this.lens.data.inTokens), 96)) + 30;
    const room = Math.max(width - this.left - 2, 40);
    this.view.fit(room, Math.min(room, 640));
    this.width = this.left + Math.max(this.view.width, 40) + 2;
    this.height = this.top + Math.max(this.view.height, 12) + 2;
    this.ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.marks]) {
      canvas.width = Math.round(this.width * this.ratio);
      canvas.height = Math.round(this.height * this.ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
    }
    this.node.style.width = `${this.width}px`;
    this.draw();
    return { left: this.left, width: this.view.width };
  }

  pen(canvas) {
    const pen = canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    return pen;
  }

  draw() {
    if (!this.width || !this.lens.nOut || !this.lens.nIn) return;
    const pen = this.pen(this.base);
    const area = new Path2D();
    area.rect(this.left, this.top, this.view.width, this.view.height);
    pen.save();
    pen.clip(area);
    pen.translate(this.left, this.top);
    const cell = Math.min(this.view.cellWidth, this.view.cellHeight);
    if (cell >= GAP_FROM) this.drawCells(pen);
    else this.drawRaster(pen);
    pen.restore();
    drawAxes(pen, this);
    this.overview.draw();
    this.drawMarks();
  }

  seen() {
    const { view } = this;
    return {
      firstRow: Math.floor(view.top),
      lastRow: Math.min(Math.ceil(view.top + view.nOut / view.zoom), view.nOut),
      firstColumn: Math.floor(view.left),
      lastColumn: Math.min(Math.ceil(view.left + view.nIn / view.zoom), view.nIn),
    };
  }

  drawCells(pen) {
    const { view, lens } = this;
    const { firstRow, lastRow, firstColumn, lastColumn } = this.seen();
    const round = Math.min(3, view.cellWidth / 6);
    for (let i = firstRow; i < lastRow; i++) {
      for (let j = firstColumn; j < lastColumn; j++) {
        pen.fillStyle = lens.colours.css(lens.share(i, j));
        pen.beginPath();
        pen.roundRect(view.xOf(j) + 0.5, view.yOf(i) + 0.5, view.cellWidth - 1, view.cellHeight - 1, round);
        pen.fill();
      }
    }
  }

  drawRaster(pen) {
    const { view, lens, ratio } = this;
    const area = { left: view.left, top: view.top, columns: view.nIn / view.zoom, rows: view.nOut / view.zoom };
    paintPixels(this.raster, lens, area, Math.round(view.width * ratio), Math.round(view.height * ratio));
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.raster, 0, 0, view.width, view.height);
  }

  drawMarks() {
    const pen = this.pen(this.marks);
    const { view, lens } = this;
    const outline = (x, y, width, height, weight, colour) => {
      pen.strokeStyle = colour;
      pen.lineWidth = weight;
      pen.strokeRect(x, y, width, height);
    };
    pen.save();
    pen.beginPath();
    pen.rect(0, 0, this.width, this.height);
    pen.rect(this.left - 2, this.top - 2, view.width + 4, view.height + 4);
    pen.clip();
    const height = Math.max(view.cellHeight, 2);
    const { accent } = lens.inks;
    outline(this.left - 0.5, this.top + view.yOf(lens.cursor.i) - 0.5, view.width + 1, height + 1, 2, accent);
    const pointed = lens.hovered ?? (this.hasFocus ? lens.cursor : null);
    if (pointed) this.drawCross(outline, pointed, height, pen);
    pen.restore();
  }

  drawCross(outline, { i, j }, height, pen) {
    const { view, lens } = this;
    const { ink } = lens.inks;
    const x = this.left + view.xOf(j);
    const y = this.top + view.yOf(i);
    pen.globalAlpha = 0.35;
    outline(x, this.top, Math.max(view.cellWidth, 1), view.height, 1, ink);
    if (i !== lens.cursor.i) outline(this.left, y, view.width, height, 1, ink);
    pen.globalAlpha = 1;
    outline(x - 0.5, y - 0.5, Math.max(view.cellWidth, 4) + 1, Math.max(view.cellHeight, 4) + 1, 2, ink);
  }

  listen() {
    const { marks } = this;
    const point = (event) => {
      const box = marks.getBoundingClientRect();
      return { x: event.clientX - box.left - this.left, y: event.clientY - box.top - this.top };
    };
    marks.addEventListener("pointermove", (event) => {
      const { x, y } = point(event);
      if (this.drag) this.pan(event);
      this.lens.hover(this.view.cellAt(x, y), event);
    });
    marks.addEventListener("pointerleave", () => this.lens.hover(null));
    marks.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.clientX, y: event.clientY, left: this.view.left, top: this.view.top, moved: false };
      marks.setPointerCapture(event.pointerId);
    });
    marks.addEventListener("pointerup", (event) => {
      const { x, y } = point(event);
      const cell = this.view.cellAt(x, y) ?? this.labelAt(x, y);
      if (cell && this.drag && !this.drag.moved) this.lens.select(cell);
      this.drag = null;
    });
    marks.addEventListener("wheel", (event) => this.wheel(event, point(event)), { passive: false });
    marks.addEventListener("dblclick", (event) => this.zoomBy(2.5, point(event)));
    marks.addEventListener("keydown", (event) => this.key(event));
    marks.addEventListener("focus", () => this.setFocus(marks.matches(":focus-visible")));
    marks.addEventListener("blur", () => this.setFocus(false));
  }

  labelAt(x, y) {
    const cell = this.view.cellAt(Math.max(x, 0), Math.max(y, 0));
    if (!cell) return null;
    return x < 0 ? { i: cell.i, j: this.lens.cursor.j } : { i: this.lens.cursor.i, j: cell.j };
  }

  pan(event) {
    const { x, y, left, top } = this.drag;
    if (Math.hypot(event.clientX - x, event.clientY - y) > 4) this.drag.moved = true;
    if (this.view.isWhole || !this.drag.moved) return;
    this.view.moveTo(left - (event.clientX - x) / this.view.cellWidth, top - (event.clientY - y) / this.view.cellHeight);
    this.redraw();
  }

  // A plain wheel scrolls the page around the map; it zooms only with Ctrl or a pinch.
  wheel(event, at) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoomBy(Math.exp(-event.deltaY / 200), at);
  }

  zoomBy(factor, at = null) {
    const { i, j } = this.lens.cursor;
    const { x, y } = at ?? { x: this.view.xOf(j + 0.5), y: this.view.yOf(i + 0.5) };
    this.view.zoomTo(this.view.zoom * factor, x, y);
    if (!at) this.view.reveal(i, j);
    this.redraw();
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  reveal({ i, j }) {
    const { left, top } = this.view;
    this.view.reveal(i, j);
    if (left !== this.view.left || top !== this.view.top) this.redraw();
    else this.drawMarks();
  }

  setFocus(hasFocus) {
    this.hasFocus = hasFocus;
    this.drawMarks();
  }

  key(event) {
    this.hasFocus = true;
    const zoom = { "+": 1.6, "=": 1.6, "-": 1 / 1.6, 0: 1e-9 }[event.key];
    if (zoom && !event.ctrlKey && !event.metaKey) this.zoomBy(zoom);
    else if (!this.lens.moveByKey(event, "both")) return;
    event.preventDefault();
  }
}
