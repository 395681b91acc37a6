// A finished map (or a preview of one): the component of `views`, facts beside it, and files to save.

import { percent } from "./controls.js";

const { mount, element } = window.TensorLens;
const FILES = ["html", "png", "json"];

export class Result {
  constructor({ onSelect }) {
    this.verdict = element("span", { class: "verdict" });
    this.bias = element("span", { class: "bias" });
    this.origin = element("span", { class: "origin" });
    this.saves = element("span", { class: "saves", "aria-label": "Save as" });
    this.facts = element("div", { class: "facts" }, [this.verdict, this.bias, this.origin, this.saves]);
    this.host = element("div", { class: "host" });
    this.node = element("section", { class: "card result", "aria-label": "Map", hidden: "" }, [this.facts, this.host]);
    this.onSelect = onSelect;
    this.host.addEventListener("tensorlens:select", (event) => {
      this.showBias();
      if (!this.isQuiet) onSelect(this.positions()[event.detail.outToken], event.detail.outToken);
    });
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
    this.lens = mount(this.host, data);
    performance.measure("explorer:picture", "explorer:start");
    this.host.shadowRoot.querySelector(".shade").hidden = true; // the page has its own
    this.choose(output);
    this.showBias();
    if (isPreview) {
      this.verdict.textContent = "";
      this.saves.replaceChildren();
    }
  }

  choose(output) {
    const row = output === null ? -1 : this.positions().indexOf(output);
    if (row < 0 || row === this.lens.cursor.i) return;
    this.isQuiet = true;
    this.lens.select({ i: row, j: this.lens.cursor.j });
    this.isQuiet = false;
  }

  get output() {
    return this.lens && this.lens.nOut ? this.positions()[this.lens.cursor.i] : null;
  }

  showBias() {
    const share = this.data.biasShare[this.lens?.cursor.i ?? 0];
    const isKnown = share !== null && share !== undefined;
    this.bias.replaceChildren("Bias share ", element("b", { text: isKnown ? percent(share) : "not known to this method" }));
  }

  finish({ certificate, result, seconds, is_kept: isKept }) {
    const failed = certificate !== null && !certificate.passed;
    this.verdict.classList.toggle("failed", failed);
    const error = certificate === null ? "" : ` (largest error ${certificate.error.toExponential(0)})`;
    this.verdict.textContent = certificate === null ? "" : failed ? `✗ Not certified${error}` : `✓ Certified exact and linear${error}`;
    this.verdict.title = "Value, linearity, adjoint, completeness and composition, measured at this input";
    const pass = isKept ? "kept model pass" : "new model pass";
    this.origin.textContent = seconds === undefined ? "" : `${seconds.toFixed(1)} s, ${pass}`;
    const links = FILES.map((kind) => element("a", { href: `/api/results/${result}.${kind}`, download: "", text: kind.toUpperCase(), "data-kind": kind }));
    this.saves.replaceChildren("Save", ...links);
  }

  hide() {
    this.node.hidden = true;
  }
}
