// The visible part of the matrix, and the size of a cell on the screen. Pure numbers, no drawing.

const LARGEST_CELL = 40;
const SMALLEST_ROW = 18;

class Viewport {
  constructor(nOut, nIn) {
    Object.assign(this, { nOut, nIn, zoom: 1, left: 0, top: 0, width: 1, height: 1, baseWidth: 1, baseHeight: 1 });
  }

  // Cells are square where possible; a map with few outputs keeps rows high enough to point at.
  fit(width, height) {
    this.baseWidth = Math.min(LARGEST_CELL, width / this.nIn);
    this.baseHeight = Math.min(LARGEST_CELL, height / this.nOut, Math.max(this.baseWidth, SMALLEST_ROW));
    this.width = this.baseWidth * this.nIn;
    this.height = this.baseHeight * this.nOut;
    this.moveTo(this.left, this.top);
  }

  get cellWidth() {
    return this.baseWidth * this.zoom;
  }

  get cellHeight() {
    return this.baseHeight * this.zoom;
  }

  get isWhole() {
    return this.zoom <= 1.0001;
  }

  get largestZoom() {
    return Math.max(1, LARGEST_CELL / Math.min(this.baseWidth, this.baseHeight));
  }

  moveTo(left, top) {
    const most = (n) => n - n / this.zoom;
    this.left = Math.min(Math.max(left, 0), most(this.nIn));
    this.top = Math.min(Math.max(top, 0), most(this.nOut));
  }

  zoomTo(zoom, x, y) {
    const column = this.left + x / this.cellWidth;
    const row = this.top + y / this.cellHeight;
    this.zoom = Math.min(Math.max(zoom, 1), this.largestZoom);
    this.moveTo(column - x / this.cellWidth, row - y / this.cellHeight);
  }

  reveal(i, j) {
    const columns = this.nIn / this.zoom;
    const rows = this.nOut / this.zoom;
    const inside = (at, start, size) => (at < start ? at : at + 1 > start + size ? at + 1 - size : start);
    this.moveTo(inside(j, this.left, columns), inside(i, this.top, rows));
  }

  cellAt(x, y) {
    if (x < 0 || y < 0 || x >= this.width || y >= this.height) return null;
    const j = Math.min(Math.floor(this.left + x / this.cellWidth), this.nIn - 1);
    return { i: Math.min(Math.floor(this.top + y / this.cellHeight), this.nOut - 1), j };
  }

  xOf(j) {
    return (j - this.left) * this.cellWidth;
  }

  yOf(i) {
    return (i - this.top) * this.cellHeight;
  }
}

// A step of 1, 2 or 5 times a power of ten that leaves at least `room` pixels between ticks.
function tickStep(cell, room) {
  const raw = Math.max(room / cell, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
}
