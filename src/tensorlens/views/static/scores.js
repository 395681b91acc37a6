// The matrix of scores: decoded once, read by row, and pooled for overviews.

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  return bytes;
}

function halfToSingle(halves) {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    let value = exponent === 31 ? (fraction ? NaN : Infinity) : (1024 + fraction) * 2 ** (exponent - 25);
    if (exponent === 0) value = fraction * 2 ** -24;
    table[bits] = bits >> 15 ? -value : value;
  }
  const singles = new Float32Array(halves.length);
  for (let k = 0; k < halves.length; k++) singles[k] = table[halves[k]];
  return singles;
}

function decode(encoded) {
  const bytes = bytesOf(encoded.data);
  return encoded.dtype === "float16" ? halfToSingle(new Uint16Array(bytes.buffer)) : new Float32Array(bytes.buffer);
}

class Scores {
  constructor(encoded, nOut, nIn, aside = []) {
    this.values = encoded.values ?? decode(encoded);
    this.unit = encoded.unit;
    this.nOut = nOut;
    this.nIn = nIn;
    this.limits = new Float32Array(nOut);
    this.setAside(aside);
  }

  // Columns outside limits and colours.
  setAside(columns) {
    this.aside = new Set(columns);
    this.hasMissing = false;
    this.findLimits();
    this.pyramids = {};
  }

  findLimits() {
    const { values, nIn } = this;
    const isAside = this.aside.size ? Array.from({ length: nIn }, (_, j) => this.aside.has(j)) : null;
    for (let i = 0; i < this.nOut; i++) {
      let limit = 0;
      for (let k = i * nIn; k < (i + 1) * nIn; k++) {
        if (isAside !== null && isAside[k - i * nIn]) continue;
        const size = Math.abs(values[k]);
        if (size > limit && size !== Infinity) limit = size;
        if (size !== size) this.hasMissing = true;
      }
      this.limits[i] = limit;
    }
    if (this.shared) this.limits.fill(this.shared);
    this.limit = this.limits.reduce((a, b) => Math.max(a, b), 0) || 1;
  }

  // Colours and bars end here, as in another map beside this one; 0 for the map's own largest score.
  endAt(shared) {
    this.shared = shared;
    this.setAside(this.aside);
  }

  at(i, j) {
    return this.values[i * this.nIn + j] * this.unit;
  }

  // The score of full colour in row i: the largest of the row, or of the map.
  scaleOf(i, perRow) {
    return (perRow ? this.limits[i] || 1 : this.limit) * this.unit;
  }

  share(i, j, perRow) {
    return this.aside.has(j) ? NaN : this.at(i, j) / this.scaleOf(i, perRow);
  }

  // Inputs by size of their score, the largest first, without zeros and inputs that are set aside.
  strongest(i, count) {
    const strength = (j) => {
      const size = Math.abs(this.at(i, j));
      return size !== size ? -1 : size;
    };
    const order = Array.from({ length: this.nIn }, (_, j) => j).filter((j) => strength(j) !== 0 && !this.aside.has(j));
    return order.sort((a, b) => strength(b) - strength(a) || a - b).slice(0, count);
  }

  // Level k holds shares of 2^k × 2^k cells. The strongest cell stands for all, so that no line is lost in an overview.
  level(k, perRow) {
    const pyramid = (this.pyramids[perRow] ??= [this.shares(perRow)]);
    while (pyramid.length <= k) pyramid.push(poolStrongest(pyramid[pyramid.length - 1]));
    return pyramid[k];
  }

  shares(perRow) {
    const { values, nOut, nIn } = this;
    const shares = new Float32Array(values.length);
    for (let i = 0; i < nOut; i++) {
      const factor = this.unit / this.scaleOf(i, perRow);
      for (let k = i * nIn; k < (i + 1) * nIn; k++) shares[k] = values[k] * factor;
      for (const j of this.aside) shares[i * nIn + j] = NaN;
    }
    return { values: shares, nOut, nIn };
  }
}

function poolStrongest({ values, nOut, nIn }) {
  const pooled = { nOut: Math.ceil(nOut / 2), nIn: Math.ceil(nIn / 2) };
  const strongest = new Float32Array(pooled.nOut * pooled.nIn).fill(NaN);
  for (let i = 0; i < nOut; i++) {
    const target = (i >> 1) * pooled.nIn;
    for (let j = 0; j < nIn; j++) {
      const value = values[i * nIn + j];
      const best = strongest[target + (j >> 1)];
      if (best !== best || Math.abs(value) > Math.abs(best)) strongest[target + (j >> 1)] = value;
    }
  }
  return { ...pooled, values: strongest };
}
