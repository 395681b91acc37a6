// One map on the screen: the state (cursor, hover, scale, shade) and the parts that show it.

// As in component.css: padding at both sides, the width from which there are two columns, the part of the figure.
const SIDES = 48;
const WIDE = 732;
const FIGURE_PART = 0.54;

class MapLens {
  constructor(host, data, source = data) {
    this.host = host;
    this.source = source;
    this.data = { setAside: [], sums: [], sink: [], ...data, outTokens: data.outTokens ?? data.inTokens };
    this.nOut = this.data.outTokens.length;
    this.nIn = this.data.inTokens.length;
    this.hasOneText = data.outTokens === null;
    this.isSigned = data.isSigned;
    this.scores = new Scores(data.scores, this.nOut, this.nIn, data.setAside);
    this.cursor = this.start();
    this.hovered = null;
    this.perRow = false;
    this.contrast = 1;
    this.node = element("div", { class: "lens" });
    this.build();
    this.applyShade();
    this.gone = new AbortController();
    onShadeChange(() => this.applyShade(), this.gone.signal);
  }

  // The first selection: the token that represents a picture, or the last output; in one row the strongest input.
  start() {
    const i = this.data.grid?.first > 0 && this.nOut > 1 ? 0 : Math.max(this.nOut - 1, 0);
    return { i, j: this.nOut === 1 ? (this.scores.strongest(0, 1)[0] ?? 0) : 0 };
  }

  // One row has no heat map, but it has its slider.
  get rowContrast() {
    return this.nOut === 1 ? this.contrast : 1;
  }

  // The place of output i in the text, for a map that has only some of its rows.
  position(i) {
    return this.data.outPositions?.[i] ?? i;
  }

  share(i, j) {
    return this.scores.share(i, j, this.perRow) * this.contrast;
  }

  build() {
    const { title } = this.data;
    const size = element("span", { class: "size", text: this.isQuestion || this.nOut === 1 ? "" : `${this.nOut} × ${this.nIn}` });
    this.badge = element("span", { class: "badge", hidden: "" });
    const header = heading(visible(title), size, this.badge);
    const note = this.said("Note");
    const notes = note ? [element("p", { class: "note", text: visible(note) })] : [];
    this.live = element("div", { class: "live", "aria-live": "polite" });
    this.tooltip = tooltip(this);
    this.caption = caption(this);
    const isEmpty = !this.nOut || !this.nIn;
    const body = isEmpty ? this.buildEmpty() : this.buildMap();
    if (this.data.answer && !isEmpty) this.answer = new AnswerText(this);
    const parts = this.answer ? [this.answer.node, element("details", { class: "as-map" }, [element("summary", { text: "As a map" }), body])] : [body];
    this.showBadge();
    this.node.append(header, ...notes, ...parts, this.live, this.tooltip.node);
  }

  // A line of the caption, by its name.
  said(name) {
    return this.data.caption.find(([one]) => one === name)?.[1] ?? "";
  }

  // The certificate in two words; its errors are in the caption.
  showBadge() {
    const [verdict] = this.said("Certificate").match(/^(passed|FAILED)/) ?? [];
    this.badge.hidden = !verdict;
    this.badge.textContent = verdict === "passed" ? "✓ certified exact" : "✗ not certified";
    this.badge.classList.toggle("failed", verdict === "FAILED");
    this.badge.title = this.said("Certificate");
  }

  buildEmpty() {
    const note = element("p", { class: "empty", text: "Nothing to show: this map has no scores." });
    return element("div", { class: "body" }, [element("div", { class: "side" }, [note, this.caption.node])]);
  }

  buildMap() {
    this.texts = [];
    this.rowLegend = legend();
    this.ranking = ranking(this);
    this.reading = element("h3", { class: "reading" });
    this.sum = element("p", { class: "sum", hidden: "" });
    this.aside = new Aside(this);
    if (this.nOut > 1) this.heatmap = new HeatMap(this);
    const ranks = element("div", { class: "ranks" }, [this.ranking.node, this.aside.node]);
    // Where a map came from is folded away below the answer to a question.
    this.origin = this.nOut === 1 && this.isQuestion ? element("details", { class: "origin" }, [element("summary", { text: "Where this comes from" }), this.caption.node]) : this.caption.node;
    const side = element("div", { class: "side" }, [this.buildText(), ranks, this.origin]);
    const columns = this.heatmap ? [this.buildFigure(), side] : [side];
    const kind = this.heatmap ? "body" : this.picture ? "body single pictured" : "body single";
    return element("div", { class: kind }, columns);
  }

  buildFigure() {
    this.mapLegend = legend();
    const scale = element("select", { "aria-label": "Colour scale" }, [
      element("option", { value: "map", text: "whole map" }),
      element("option", { value: "row", text: "each row" }),
    ]);
    scale.addEventListener("change", () => this.rescale({ perRow: scale.value === "row" }));
    const zoom = element("span", { class: "zoom" }, [
      button("−", "Zoom out", () => this.heatmap.zoomBy(1 / 1.6)),
      button("+", "Zoom in", () => this.heatmap.zoomBy(1.6)),
      button("Fit", "Show the whole map", () => this.heatmap.zoomBy(1e-9)),
    ]);
    const controls = element("div", { class: "controls" }, [
      element("label", { class: "control" }, [element("span", { text: "Colours" }), scale]),
      this.buildContrast(),
      zoom,
      ...this.buildSwitches(),
    ]);
    this.below = element("div", {}, [this.mapLegend.node, controls]);
    return element("div", { class: "figure" }, [this.heatmap.node, this.below]);
  }

  buildContrast() {
    const contrast = element("input", { type: "range", min: "0", max: "100", value: "0", "aria-label": "Contrast" });
    contrast.addEventListener("input", () => this.rescale({ contrast: 20 ** (contrast.value / 100) }));
    return element("label", { class: "control" }, [element("span", { text: "Contrast" }), contrast]);
  }

  buildSwitches() {
    const words = this.source.words.length ? [checkbox("Whole words", this.isInWords, (isOn) => this.useWords(isOn))] : [];
    return [...(this.aside.control ? [this.aside.control] : []), ...words];
  }

  get isQuestion() {
    return this.data.title.startsWith("Why ");
  }

  get isInWords() {
    return this.nIn !== this.source.inTokens.length;
  }

  // More may become known about the map's origin, such as a certificate.
  recaption(lines) {
    this.source.caption = this.data.caption = lines;
    const next = caption(this);
    this.caption.node.replaceWith(next.node);
    this.caption = next;
    next.update();
    this.showBadge();
  }

  // The map of the words, or of the tokens again, with the same output chosen.
  useWords(isOn) {
    const { i } = this.cursor;
    const next = mount(this.host, isOn ? inWords(this.source) : this.source, this.source);
    if (i !== next.cursor.i) next.select({ i, j: next.cursor.j });
    next.node.querySelector(".switch:last-child input")?.focus();
  }

  buildText() {
    const { inTokens, outTokens, grid } = this.data;
    const parts = [this.reading];
    if (!this.hasOneText && this.nOut > 1) {
      this.addText(parts, outTokens, { label: "Outputs", moves: "out", isColoured: false });
    }
    if (grid) {
      this.picture = new PatchOverlay(this);
      parts.push(this.picture.node);
    } else {
      const moves = this.hasOneText ? "out" : "in";
      const label = this.hasOneText ? "Tokens; the selected one is the output" : "Inputs";
      this.addText(parts, inTokens, { label, moves, isColoured: true });
    }
    const isAlone = !this.heatmap && !grid;
    const controls = isAlone ? [element("div", { class: "controls" }, [this.buildContrast(), ...this.buildSwitches()])] : [];
    return element("section", {}, [...parts, this.sum, this.rowLegend.node, ...controls]);
  }

  addText(parts, tokens, options) {
    const text = new TokenText(this, tokens, options);
    this.texts.push(text);
    parts.push(text.node);
  }

  applyShade() {
    this.shade = shadeAround();
    this.host.dataset.shade = this.shade;
    this.colours = new Colours(this.isSigned, this.shade);
    const style = (name) => getComputedStyle(this.host).getPropertyValue(name).trim();
    this.inks = { ink: style("--ink"), label: style("--label"), muted: style("--muted"), accent: style("--accent") };
    this.paint();
  }

  layout() {
    const width = this.node.clientWidth - SIDES;
    if (!this.heatmap || width <= 0) return;
    const { left, width: plot } = this.heatmap.layout(width >= WIDE ? width * FIGURE_PART : width);
    this.mapLegend.node.style.width = `${Math.min(Math.max(plot, 160), 340)}px`;
    this.below.style.marginInlineStart = `${width >= WIDE ? left : 0}px`;
    this.below.style.width = `${width >= WIDE ? Math.max(plot, 240) : width}px`;
  }

  rescale(change) {
    Object.assign(this, change);
    this.paint();
  }

  paint() {
    this.answer?.paint();
    this.heatmap?.redraw();
    this.mapLegend?.update(this, this.scores.limit * this.scores.unit, this.contrast, "the map");
    if (this.mapLegend && this.perRow) this.mapLegend.update(this, 1, this.contrast, "each row, as a share of its largest score");
    this.paintRow();
  }

  paintRow() {
    this.caption.update();
    if (!this.texts) return;
    const { i } = this.cursor;
    this.reading.replaceChildren(...this.readingOf(i));
    this.texts.forEach((text) => text.paint());
    this.picture?.paint();
    this.ranking.update();
    this.sum.textContent = visible(this.data.sums[i] ?? "");
    this.sum.hidden = !this.data.sums[i];
    const [limit, what] = this.picture ? [this.picture.limit(), "the patches"] : [this.scores.scaleOf(i, true), "this row"];
    this.rowLegend.update(this, limit, this.picture ? 1 : this.rowContrast, what);
    this.mark(true);
  }

  // Below a question, the meaning of the colours; otherwise their output.
  readingOf(i) {
    if (this.isQuestion && this.nOut === 1) return [this.isSigned ? `${WARM[this.shade]} supports it, blue works against it` : "The stronger the colour, the more it contributes"];
    return ["What makes the output ", element("bdi", { text: `“${shorten(visible(this.data.outTokens[i]), 40)}”` }), ` (${this.position(i)})`];
  }

  mark(isMoved = false) {
    this.texts.forEach((text) => text.mark(isMoved));
    this.picture?.mark();
    if (!this.heatmap?.width) return;
    if (isMoved) this.heatmap.reveal(this.cursor);
    else this.heatmap.drawMarks();
  }

  hover(cell, event = null) {
    const isSame = cell?.i === this.hovered?.i && cell?.j === this.hovered?.j;
    this.hovered = cell;
    this.tooltip.show(cell, event);
    if (!isSame) this.mark();
  }

  select({ i, j }) {
    const isOtherRow = i !== this.cursor.i;
    this.cursor = { i, j };
    this.hover(null);
    if (isOtherRow) this.paintRow();
    else this.mark(true);
    const { outTokens, inTokens } = this.data;
    this.live.textContent = `Output ${this.position(i)} ${visible(outTokens[i])} from input ${j} ${visible(inTokens[j])}: ${formatNumber(this.scores.at(i, j), this.isSigned)}`;
    this.host.dispatchEvent(new CustomEvent("tensorlens:select", { bubbles: true, composed: true, detail: { outToken: i, inToken: this.data.firstTokens?.[j] ?? j } }));
  }

  // Arrow keys move along what has the focus: an output, an input, or both in the heat map. Shift changes the other one.
  moveByKey(event, moves) {
    const across = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if ((across ?? down) === undefined || event.ctrlKey || event.metaKey || event.altKey) return false;
    const clamp = (at, n) => Math.min(Math.max(at, 0), n - 1);
    const isOut = moves === "both" ? down !== undefined : (moves === "out") !== event.shiftKey;
    const step = across ?? down;
    const { i, j } = this.cursor;
    this.select(isOut ? { i: clamp(i + step, this.nOut), j } : { i, j: clamp(j + step, this.nIn) });
    return true;
  }
}
