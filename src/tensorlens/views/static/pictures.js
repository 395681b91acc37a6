// Pictures with boxes coloured by scores: `places` holds the column and the box of each, as parts of width and height.

class Pictures {
  constructor(pictures, onPick) {
    this.pictures = pictures.map(({ image, places }, k) => {
      const canvas = element("canvas", { width: 448, height: 448, role: "img", "aria-label": `Image ${k + 1}: scores of its ${places.length} parts` });
      const picture = image ? [element("img", { src: image, alt: `Image ${k + 1}`, draggable: "false" })] : [];
      const stage = element("div", { class: "stage" }, [...picture, canvas]);
      if (!image) stage.style.aspectRatio = "1";
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        const column = this.at(places, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
        if (column !== null) onPick(column);
      });
      return { canvas, stage, isPictured: Boolean(image), columns: new Set(places.map(([column]) => column)), places: this.largestFirst(places) };
    });
    this.node = element("div", { class: "pictures" }, this.pictures.map(({ stage }) => stage));
  }

  // A tile lies on the whole picture that the model saw as well.
  largestFirst(places) {
    const area = ([, left, top, right, bottom]) => (right - left) * (bottom - top);
    return [...places].sort((one, other) => area(other) - area(one));
  }

  at(places, x, y) {
    const hit = this.largestFirst(places).reverse().find(([, left, top, right, bottom]) => left <= x && x < right && top <= y && y < bottom);
    return hit ? hit[0] : null;
  }

  holds(column) {
    return this.pictures.findIndex(({ columns }) => columns.has(column));
  }

  // Each box covers the picture by the size of its score; full colour is the largest of all pictures.
  paint(score, colours, chosen = null) {
    const all = this.pictures.flatMap(({ columns }) => [...columns].map((column) => Math.abs(score(column)) || 0));
    const limit = Math.max(...all, 0) || 1;
    for (const { canvas, places, isPictured } of this.pictures) {
      const pen = canvas.getContext("2d");
      const { width, height } = canvas;
      pen.clearRect(0, 0, width, height);
      for (const [column, left, top, right, bottom] of places) {
        const share = Math.max(-1, Math.min(1, (score(column) || 0) / limit));
        pen.globalAlpha = isPictured ? 0.75 * Math.abs(share) : 1;
        pen.fillStyle = colours.css(share);
        pen.fillRect(left * width, top * height, (right - left) * width, (bottom - top) * height);
        if (column !== chosen) continue;
        pen.globalAlpha = 1;
        pen.strokeStyle = "#000";
        pen.lineWidth = 3;
        pen.strokeRect(left * width, top * height, (right - left) * width, (bottom - top) * height);
      }
    }
  }
}
