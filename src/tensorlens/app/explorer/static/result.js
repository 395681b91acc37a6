// A finished map (or a preview of one): the component of `views`, facts beside it, and files to save.

import { percent } from "./controls.js";

const { mount, element, button } = window.TensorLens;
const FILES = ["html", "png", "svg", "json", "csv"];

export class Result {
  constructor({ onSelect, copies }) {
    this.says = element("p", { class: "says", hidden: "" });
    this.told = element("p", { class: "live", role: "status" });
    this.verdict = element("span", { class: "verdict", role: "status" });
    this.bias = element("span", { class: "bias" });
    this.origin = element("span", { class: "origin" });
    this.copies = element("span", { class: "saves" }, ["Copy as", ...copies.map(([name, act]) => button(name, `Copy as ${name}`, act))]);
    this.saves = element("span", { class: "saves", "aria-label": "Save as" });
    this.facts = element("div", { class: "facts" }, [this.verdict, this.bias, this.origin, element("span", { class: "files" }, [this.copies, this.saves])]);
    this.age = element("p", { class: "age", text: "The text has changed. Press Map to update the map." });
    this.host = element("div", { class: "host embedded" });
    this.node = element("section", { class: "card result", "aria-label": "Map", hidden: "" }, [this.told, this.says, this.age, this.host, this.facts]);
    this.onSelect = onSelect;
    this.host.addEventListener("tensorlens:select", (event) => {
      this.showBias();
      if (!this.isQuiet) onSelect(this.positions()[event.detail.outToken]);
    });
  }

  // The component makes itself anew when tokens become words.
  get lens() {
    return this.host.tensorlens;
  }

  positions() {
    const { outPositions, outTokens, inTokens } = this.data;
    return outPositions ?? (outTokens ?? inTokens).map((_, k) => k);
  }

  // Show a map with output `output` (a position in the text) chosen.
  show(data, { output = null, isPreview = false } = {}) {
    this.data = data;
    this.node.hidden = false;
    this.node.classList.toggle("preview", isPreview);
    performance.mark("explorer:start");
    mount(this.host, data);
    performance.measure("explorer:picture", "explorer:start");
    this.told.textContent = isPreview ? "" : this.host.tensorlens.data.title;
    this.choose(output);
    this.showBias();
    this.verdict.textContent = this.origin.textContent = "";
    this.saves.replaceChildren();
  }

  choose(output) {
    const row = output === null ? -1 : this.positions().indexOf(output);
    if (row < 0 || row === this.lens.cursor.i) return;
    this.isQuiet = true;
    this.lens.select({ i: row, j: this.lens.cursor.j });
    this.isQuiet = false;
  }

  // The score of full colour in the row that is shown; two maps side by side share it; 0 for the map's own.
  get scale() {
    return this.lens.scores.scaleOf(this.lens.cursor.i, this.lens.nOut === 1);
  }

  rescale(most) {
    this.lens.scores.endAt(most / this.lens.scores.unit);
    this.lens.paint();
  }

  get output() {
    return this.lens && this.lens.nOut ? this.positions()[this.lens.cursor.i] : null;
  }

  say(saying) {
    this.says.hidden = saying === null;
    if (saying) this.says.replaceChildren("The model says ", element("bdi", { text: saying[0] }), ` (${saying[1]})`);
  }

  showBias() {
    const share = this.data.biasShare[this.lens?.cursor.i ?? 0];
    const isKnown = share !== null && share !== undefined;
    this.bias.replaceChildren("Bias share ", element("b", { text: isKnown ? percent(share) : "not known for this method" }));
  }

  // Files can be saved as soon as the map is there; the certificate may take longer.
  offer(result, seconds) {
    this.seconds = seconds;
    const link = (kind) => {
      const href = `/api/results/${result}.${kind}`;
      const node = element("a", { href, download: "", text: kind.toUpperCase(), "data-kind": kind });
      node.addEventListener("click", () => (node.href = this.lens.isInWords && kind !== "html" ? `${href}?words=1` : href));
      return node;
    };
    this.saves.replaceChildren("Save", ...FILES.map(link));
    this.copies.hidden = false;
  }

  finish({ certificate, caption, is_of_tensor: isOfTensor, is_kept: isKept }) {
    const state = !isOfTensor ? "foreign" : certificate === null ? "unchecked" : certificate.passed ? "passed" : "failed";
    const error = certificate === null ? "" : ` (largest error ${certificate.error === null ? "unknown" : certificate.error.toExponential(0)})`;
    const texts = { foreign: "Not derived from T", unchecked: "", passed: `✓ Certified exact and linear${error}`, failed: `✗ Not certified${error}` };
    this.verdict.className = `verdict ${state}`;
    this.verdict.textContent = texts[state];
    this.verdict.title = state === "foreign" ? "A baseline or control: the certificate of T says nothing about it" : "Value, linearity, adjoint, completeness and composition, measured at this input";
    const pass = isKept ? "model pass reused" : "new model pass";
    this.origin.textContent = this.seconds === undefined ? "" : `${this.seconds.toFixed(1)} s, ${pass}`;
    this.lens.recaption(caption);
  }

  hide() {
    this.node.hidden = true;
  }
}
