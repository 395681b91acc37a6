// Cells smaller than a pixel: each pixel takes the colour of the strongest score it covers, so that no line is lost.

// First and last + 1 cell under each of `count` pixels that share `length` cells from `start` on.
function cellsUnderPixels(start, length, count, nCells, size) {
  const ranges = new Int32Array(2 * count);
  for (let p = 0; p < count; p++) {
    const first = Math.floor((start + (p * length) / count) / size);
    const last = Math.ceil((start + ((p + 1) * length) / count) / size);
    ranges[2 * p] = Math.min(first, nCells - 1);
    ranges[2 * p + 1] = Math.min(Math.max(last, first + 1), nCells);
  }
  return ranges;
}

function strongestIn({ values, nIn }, firstRow, lastRow, firstColumn, lastColumn) {
  let strongest = NaN;
  for (let i = firstRow; i < lastRow; i++) {
    for (let k = i * nIn + firstColumn; k < i * nIn + lastColumn; k++) {
      if (strongest !== strongest || Math.abs(values[k]) > Math.abs(strongest)) strongest = values[k];
    }
  }
  return strongest;
}

// Draw the cells of `area` on a canvas of width × height pixels.
function paintPixels(canvas, lens, { left, top, columns, rows }, width, height) {
  const cellsInPixel = Math.min(columns / width, rows / height);
  const k = Math.max(0, Math.floor(Math.log2(cellsInPixel)));
  const level = lens.scores.level(k, lens.perRow);
  const across = cellsUnderPixels(left, columns, width, level.nIn, 2 ** k);
  const down = cellsUnderPixels(top, rows, height, level.nOut, 2 ** k);
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const { colours, contrast } = lens;
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const share = strongestIn(level, down[2 * y], down[2 * y + 1], across[2 * x], across[2 * x + 1]);
      pixels[at++] = colours.words[colours.index(share * contrast)];
    }
  }
  pen.putImageData(image, 0, 0);
}
