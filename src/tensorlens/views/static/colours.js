// Colours of scores. A share is a score divided by the limit of the scale: −1 … 1 when signed, 0 … 1 otherwise.

const STEPS = 512;
const WARM = { light: "Red", dark: "Orange" };

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function between(stops, position) {
  const at = Math.min(Math.max(position, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((value, c) => Math.round(value + (stops[low + 1][c] - value) * (at - low)));
}

class Colours {
  constructor(isSigned, shade) {
    this.isSigned = isSigned;
    this.shade = shade;
    this.stops = PALETTES[isSigned ? "signed" : "unsigned"][shade].map(channels);
    this.missing = channels(PALETTES.missing[shade][0]);
    this.table = Array.from({ length: STEPS + 1 }, (_, k) => between(this.stops, k / STEPS));
    // Canvas bytes are red, green, blue, alpha; as one little-endian word that is 0xAABBGGRR.
    this.words = Uint32Array.from([...this.table, this.missing], ([r, g, b]) => 0xff000000 | (b << 16) | (g << 8) | r);
  }

  index(share) {
    if (share !== share) return STEPS + 1;
    const position = this.isSigned ? (share + 1) / 2 : share;
    return position <= 0 ? 0 : position >= 1 ? STEPS : (position * STEPS + 0.5) | 0;
  }

  rgb(share) {
    return share !== share ? this.missing : this.table[this.index(share)];
  }

  css(share) {
    return `rgb(${this.rgb(share).join(" ")})`;
  }

  // Black or white text, whichever stands out more (WCAG relative luminance).
  inkOn(share) {
    const [r, g, b] = this.rgb(share).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#111418" : "#ffffff";
  }

  gradient() {
    return `linear-gradient(to right, ${this.stops.map((stop) => `rgb(${stop.join(" ")})`).join(", ")})`;
  }
}
