// The graph of a target: tokens from left to right, blocks from below to above, with pan, zoom and click.

const STEP_X = 54;
const STEP_Y = 26;
const REACH = 12;
const LABELLED = 12;
const DRAWN = 150;

class GraphView {
  constructor(data, onChoose, say) {
    Object.assign(this, { data, onChoose, say, view: { x: 0, y: 0, scale: 1, stretch: 1 }, shade: "light" });
    const { graph, tokens } = data;
    this.canvas = element("canvas", { class: "graph", tabindex: "0", role: "img", "aria-label": "Graph of components: drag to move, scroll to zoom, click a node" });
    this.share = element("span", { class: "size" });
    const fit = element("button", { type: "button", text: "Fit" });
    fit.addEventListener("click", () => this.fit());
    this.slider = element("input", { type: "range", min: "1", max: String(graph.edges.length || 1), value: String(Math.min(DRAWN, graph.edges.length)), "aria-label": "Number of edges drawn" });
    this.slider.addEventListener("input", () => this.draw());
    this.list = element("ul", { class: "edges" });
    const tools = element("div", { class: "graph-tools" }, [fit, element("label", {}, ["edges ", this.slider]), this.share]);
    const across = tokens.length > 1 ? "Tokens run from left to right, " : "The parts of a block stand side by side, ";
    this.legend = element("span", { text: "Red" });
    const legend = element("p", { class: "tip" }, [this.legend, " raises the target, blue lowers it; wide edges and large nodes carry more. " + across + "blocks from bottom to top: 2.1 is head 1 of block 2, ff a feed-forward. The strongest nodes are labelled; point at the others. Click a node to see what it received and passed on."]);
    this.node = element("section", { class: "graph-part" }, [element("h3", { text: `Graph: components${tokens.length > 1 ? " at tokens" : ""}, and what they pass to each other` }), tools, legend, this.canvas, this.list]);
    this.sink = this.findSink();
    this.isAside = this.sink !== null;
    if (this.isAside) tools.append(checkbox(`Set aside “${shorten(visible(tokens[this.sink]), 16).trim()}”, which outweighs every other token`, true, (isOn) => this.setAside(isOn)));
    this.edges = [...graph.edges].sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
    this.total = this.edges.reduce((sum, [, , weight]) => sum + Math.abs(weight), 0) || 1;
    this.scale();
    this.place(graph.nodes, tokens.length);
    this.listen();
  }

  // The first token, if its nodes carry more than those of every other token but the last: an attention sink.
  findSink() {
    const { nodes } = this.data.graph;
    const carried = new Map();
    for (const { kind, token, value } of nodes) if (kind !== "target") carried.set(token, (carried.get(token) ?? 0) + Math.abs(value));
    const last = this.data.tokens.length - 1;
    const others = [...carried].filter(([token]) => token !== 0 && token !== last).map(([, size]) => size);
    return others.length && carried.get(0) > Math.max(...others) ? 0 : null;
  }

  isOut(node) {
    return this.isAside && node.token === this.sink && node.kind !== "target";
  }

  // Sizes, widths and labels are relative to the nodes that are not set aside.
  scale() {
    const { nodes } = this.data.graph;
    const shown = nodes.filter((node) => !this.isOut(node));
    const kept = this.edges.filter(([from, to]) => !this.isOut(nodes[from]) && !this.isOut(nodes[to]));
    this.heaviest = Math.abs((kept[0] ?? this.edges[0])?.[2] ?? 1);
    this.worth = Math.max(...shown.map(({ value }) => Math.abs(value))) || 1;
    this.named = new Set(shown.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LABELLED));
  }

  setAside(isOn) {
    this.isAside = isOn;
    this.scale();
    this.draw();
  }

  // Nodes of one token and block are beside each other; a step is as wide as its fullest place.
  place(nodes) {
    const taken = new Map();
    const widths = new Map();
    const last = Math.max(0, ...nodes.map(({ block }) => block ?? 0));
    nodes.forEach((node) => {
      const level = node.kind === "target" ? last + 2 : node.block === null ? -1 : node.block + (node.kind === "feed-forward" ? 0.5 : 0);
      const key = `${node.token} ${level}`;
      node.slot = taken.get(key) ?? 0;
      taken.set(key, node.slot + 1);
      node.level = level;
      widths.set(node.token, Math.max(widths.get(node.token) ?? 1, node.slot + 1));
    });
    this.columns = new Map();
    let x = 0;
    [...widths.keys()].sort((a, b) => a - b).forEach((token) => {
      this.columns.set(token, x);
      x += STEP_X * 0.4 * (widths.get(token) - 1) + STEP_X;
    });
    nodes.forEach((node) => {
      node.x = this.columns.get(node.token) + node.slot * STEP_X * 0.4;
      node.y = -node.level * STEP_Y;
    });
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.offsetX, y: event.offsetY, isMoved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.isMoved) this.pick(this.under(event));
      this.drag = null;
    });
    canvas.addEventListener("keydown", (event) => {
      const factor = { "+": 1.25, "=": 1.25, "-": 0.8 }[event.key];
      if (factor) this.zoom(factor, canvas.clientWidth / 2, canvas.clientHeight / 2);
    });
    new ResizeObserver(() => (this.isMoved ? this.draw() : this.fit())).observe(canvas);
  }

  move(event) {
    if (!this.drag) {
      const node = this.under(event);
      if (node) this.say(this.describe(node));
      return;
    }
    this.isMoved = true;
    this.view.x += event.offsetX - this.drag.x;
    this.view.y += event.offsetY - this.drag.y;
    this.drag = { x: event.offsetX, y: event.offsetY, isMoved: this.drag.isMoved || Math.abs(event.offsetX - this.drag.x) + Math.abs(event.offsetY - this.drag.y) > 2 };
    this.draw();
  }

  describe(node) {
    return `${node.name} at ${node.token} ${visible(this.data.tokens[node.token])}: ${formatNumber(node.value, true)}`;
  }

  zoom(factor, x, y) {
    const { view } = this;
    const scale = Math.min(6, Math.max(0.05, view.scale * factor));
    view.x = x - ((x - view.x) * scale) / view.scale;
    view.y = y - ((y - view.y) * scale) / view.scale;
    view.scale = scale;
    this.isMoved = true;
    this.draw();
  }

  fit() {
    const { nodes } = this.data.graph;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !nodes.length) return;
    const xs = nodes.map((node) => node.x);
    const ys = nodes.map((node) => node.y);
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const scale = Math.min(2, (width - 80) / (right - left || 1), (height - 90) / (bottom - top || 1));
    const stretch = Math.max(1, (width - 160) / (scale * (right - left || 1)));
    this.view = { scale, stretch, x: width / 2 - (stretch * scale * (left + right)) / 2, y: (height - 40) / 2 - (scale * (top + bottom)) / 2 };
    this.isMoved = false;
    this.draw();
  }

  at(node) {
    return [node.x * this.view.stretch * this.view.scale + this.view.x, node.y * this.view.scale + this.view.y];
  }

  under(event) {
    let best = null;
    let nearest = REACH;
    for (const node of this.data.graph.nodes) {
      const [x, y] = this.at(node);
      const distance = Math.hypot(event.offsetX - x, event.offsetY - y);
      if (distance < nearest) [best, nearest] = [node, distance];
    }
    return best;
  }

  pick(node) {
    this.chosen = node;
    this.showEdges();
    this.draw();
    if (node) this.onChoose(node);
  }

  choose(isIt) {
    const found = this.data.graph.nodes.filter(isIt).sort((a, b) => Math.abs(b.value) - Math.abs(a.value))[0] ?? null;
    this.chosen = found;
    this.showEdges();
    this.draw();
  }

  showEdges() {
    const { nodes } = this.data.graph;
    const at = nodes.indexOf(this.chosen);
    const line = ([from, to, weight]) => {
      const other = nodes[from === at ? to : from];
      return element("li", { text: `${formatNumber(weight, true)} ${from === at ? "to" : "from"} ${other.name} at ${other.token} ${visible(this.data.tokens[other.token])}` });
    };
    // Incoming edges on the left, outgoing edges on the right.
    const sides = [this.edges.filter(([, to]) => to === at), this.edges.filter(([from]) => from === at)].map((some) => some.slice(0, 6).map(line));
    const pairs = Array.from({ length: Math.max(...sides.map((side) => side.length)) }, (_, k) => sides.map((side) => side[k] ?? element("li", { class: "none" })));
    this.list.replaceChildren(...pairs.flat());
  }

  reshade(shade) {
    this.shade = shade;
    this.legend.textContent = WARM[shade];
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.drawEdges(pen);
    this.drawNodes(pen);
    this.drawTokens(pen, height);
  }

  colour(value) {
    const stops = PALETTES.signed[this.shade];
    return value < 0 ? stops[2] : stops[stops.length - 3];
  }

  drawEdges(pen) {
    const { nodes } = this.data.graph;
    const at = nodes.indexOf(this.chosen);
    const drawn = this.edges.slice(0, Number(this.slider.value));
    const kept = drawn.reduce((sum, [, , weight]) => sum + Math.abs(weight), 0) / this.total;
    this.share.textContent = `${drawn.length} of ${this.edges.length} edges, ${Math.round(100 * kept * this.data.graph.share)} % of what flows into the ${nodes.length} nodes shown; the rest is cut off`;
    drawn.forEach(([from, to, weight]) => {
      const isOfChosen = at >= 0 && (from === at || to === at);
      const [a, b] = [this.at(nodes[from]), this.at(nodes[to])];
      const isOut = this.isOut(nodes[from]) || this.isOut(nodes[to]);
      pen.strokeStyle = isOut ? "#8a939d" : this.colour(weight);
      pen.globalAlpha = isOfChosen || (at < 0 && !isOut) ? 0.75 : 0.25;
      pen.lineWidth = isOut ? 0.8 : Math.max(0.4, 5 * Math.sqrt(Math.abs(weight) / this.heaviest));
      pen.beginPath();
      pen.moveTo(...a);
      const middle = (a[1] + b[1]) / 2;
      // Between nodes above each other an edge bends to the left, the more the longer it is.
      const bow = nodes[from].token === nodes[to].token ? 0.3 * Math.abs(a[1] - b[1]) : 0;
      if (bow) pen.bezierCurveTo(Math.min(a[0], b[0]) - bow, a[1], Math.min(a[0], b[0]) - bow, b[1], ...b);
      else pen.bezierCurveTo(a[0], middle, b[0], middle, ...b);
      pen.stroke();
    });
    pen.globalAlpha = 1;
  }

  drawNodes(pen) {
    const isDark = this.shade === "dark";
    pen.font = "10px system-ui, sans-serif";
    pen.textAlign = "left";
    const labels = [];
    for (const node of this.data.graph.nodes) {
      const [x, y] = this.at(node);
      const isOut = this.isOut(node);
      const size = isOut ? 2.5 : 2.5 + 6 * Math.sqrt(Math.abs(node.value) / this.worth);
      pen.beginPath();
      pen.arc(x, y, size, 0, 2 * Math.PI);
      pen.fillStyle = isOut ? "#8a939d" : this.colour(node.value);
      pen.fill();
      pen.lineWidth = node === this.chosen ? 3 : 1;
      pen.strokeStyle = node === this.chosen ? (isDark ? "#6cb6ff" : "#0b6bcb") : isDark ? "#111417" : "#ffffff";
      pen.stroke();
      if (this.named.has(node) || this.view.scale > 2.5 || node === this.chosen || node.kind === "target") labels.push({ node, x: x + size + 2, y: y + 3 });
    }
    this.drawLabels(pen, labels);
  }

  // The chosen node's label first, then the strongest; a label that would cover another is left out.
  drawLabels(pen, labels) {
    const isDark = this.shade === "dark";
    const rank = ({ node }) => (node === this.chosen || node.kind === "target" ? Infinity : Math.abs(node.value));
    const drawn = [];
    for (const { node, x, y } of labels.sort((a, b) => rank(b) - rank(a))) {
      const text = shorten(visible(node.short.trim()), 20);
      const right = x + pen.measureText(text).width;
      if (drawn.some((one) => x < one.right && right > one.x && Math.abs(y - one.y) < 10)) continue;
      drawn.push({ x, right, y });
      pen.strokeStyle = isDark ? "#111417" : "#ffffff";
      pen.lineWidth = 3;
      pen.strokeText(text, x, y);
      pen.fillStyle = isDark ? "#eef1f4" : "#14181d";
      pen.fillText(text, x, y);
    }
  }

  drawTokens(pen, height) {
    pen.fillStyle = this.shade === "dark" ? "#c9d0d8" : "#333a42";
    pen.textAlign = "center";
    let end = -Infinity;
    for (const [token, x] of this.columns) {
      const place = x * this.view.stretch * this.view.scale + this.view.x;
      const text = shorten(visible(this.data.tokens[token]), 10);
      const half = pen.measureText(text).width / 2;
      if (place - half < end + 4) continue;
      pen.fillText(text, place, height - 8);
      end = place + half;
    }
  }
}
