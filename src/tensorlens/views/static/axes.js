// Around the heat map: token labels if they fit, otherwise positions, and the overview of a zoomed map.

const LARGEST_LABEL = 12.5;

function labelFont(size) {
  return `${size}px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif`;
}

function axisLabel(token) {
  return shorten(visible(token), 18).trim();
}

// The label cut to `width` pixels; squeezed letters would be harder to read than missing ones.
function fitted(pen, token, width) {
  let text = axisLabel(token);
  while (text.length > 2 && pen.measureText(text).width > width) text = shorten(text, Array.from(text).length - 1);
  return text;
}

function drawAxes(pen, map) {
  const { view, lens } = map;
  pen.textBaseline = "middle";
  pen.fillStyle = lens.inks.label;
  pen.textAlign = "right";
  const down = { tokens: lens.data.outTokens, cell: view.cellHeight, start: view.top, end: view.top + view.nOut / view.zoom };
  for (const { at, text, size } of ticks(down)) {
    pen.font = labelFont(size);
    pen.fillText(fitted(pen, text, map.left - 28), map.left - 8, map.top + view.yOf(at + 0.5));
  }
  pen.textAlign = "left";
  const across = { tokens: lens.data.inTokens, cell: view.cellWidth, start: view.left, end: view.left + view.nIn / view.zoom };
  for (const { at, text, size } of ticks(across)) {
    pen.save();
    pen.translate(map.left + view.xOf(at + 0.5), map.top - 8);
    pen.rotate(-Math.PI / 2);
    pen.font = labelFont(size);
    pen.fillText(fitted(pen, text, map.top - 28), 0, 0);
    pen.restore();
  }
  drawTitles(pen, map);
}

function ticks({ tokens, cell, start, end }) {
  const isLabelled = cell >= LABELS_FROM;
  const step = isLabelled ? 1 : tickStep(cell, 34);
  const size = isLabelled ? Math.min(LARGEST_LABEL, Math.max(9, cell * 0.62)) : 10.5;
  const found = [];
  for (let at = Math.ceil((start - 0.5) / step) * step; at + 0.5 <= end; at += step) {
    if (at in tokens) found.push({ at, text: isLabelled ? tokens[at] : String(at), size });
  }
  return found;
}

function drawTitles(pen, map) {
  pen.fillStyle = map.lens.inks.muted;
  pen.font = labelFont(11);
  pen.textAlign = "left";
  pen.fillText("Input →", map.left, 8);
  pen.save();
  pen.translate(8, map.top);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "right";
  pen.fillText("← Output", 0, 0);
  pen.restore();
}

// A thumbnail of the whole map with a frame around the visible part; drag it to move.
class Overview {
  constructor(map) {
    this.map = map;
    this.node = element("canvas", { class: "overview", hidden: "", "aria-hidden": "true" });
    const move = (event) => {
      if (event.buttons) this.centreAt(event);
    };
    this.node.addEventListener("pointerdown", (event) => {
      this.node.setPointerCapture(event.pointerId);
      this.centreAt(event);
    });
    this.node.addEventListener("pointermove", move);
  }

  centreAt(event) {
    const { view } = this.map;
    const box = this.node.getBoundingClientRect();
    const column = ((event.clientX - box.left) / box.width) * view.nIn;
    const row = ((event.clientY - box.top) / box.height) * view.nOut;
    view.moveTo(column - view.nIn / view.zoom / 2, row - view.nOut / view.zoom / 2);
    this.map.redraw();
  }

  draw() {
    const { view, lens, ratio } = this.map;
    this.node.hidden = view.isWhole;
    if (view.isWhole) return;
    const width = Math.min(120, view.width / 3);
    const height = Math.max(16, Math.min(120, (width * view.height) / view.width));
    Object.assign(this.node.style, { width: `${width}px`, height: `${height}px`, top: `${this.map.top + 8}px` });
    const whole = { left: 0, top: 0, columns: view.nIn, rows: view.nOut };
    paintPixels(this.node, lens, whole, Math.round(width * ratio), Math.round(height * ratio));
    this.frame(this.node.getContext("2d"), view, lens.inks.accent, ratio);
  }

  frame(pen, view, colour, ratio) {
    pen.strokeStyle = colour;
    pen.lineWidth = 2 * ratio;
    const x = (view.left / view.nIn) * this.node.width;
    const y = (view.top / view.nOut) * this.node.height;
    pen.strokeRect(x, y, Math.max(this.node.width / view.zoom, 5), Math.max(this.node.height / view.zoom, 5));
  }
}
