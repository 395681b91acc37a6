// The inside of a model at one input: block × head, the flow over depth and tokens, and the graph.

const MOST_HEADS = 10;
const MOST_OTHERS = 5;
const isHead = (column) => /^\d+$/.test(column);

class Inside {
  constructor(host, data) {
    this.host = host;
    this.data = data;
    this.root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
    this.shade = shadeAround();
    this.effect = "total";
    this.by = "component";
    this.build();
    onShadeChange(() => this.reshade());
    this.reshade();
  }

  build() {
    const { data } = this;
    const style = element("style", { text: STYLE + INSIDE_STYLE });
    const value = `${visible(data.target)} = ${formatNumber(data.value, false)}`;
    const header = heading(visible(data.title), element("span", { class: "size", text: value }));
    this.tip = element("p", { class: "tip", role: "status", "aria-live": "polite", text: data.components ? "Point at a cell; click one to see what it read and where it wrote." : "" });
    this.about = element("section", { class: "about", "aria-label": "Component" });
    this.pictures = element("div", { class: "pictures" });
    if (data.components) this.pictures.append(this.buildRanking(), this.buildHeads(), this.buildFlow());
    const parts = [header, this.pictures, this.tip, this.about];
    if (data.graph) {
      this.graph = new GraphView(data, (node) => this.chooseNode(node), (text) => (this.tip.textContent = text));
      parts.push(this.graph.node);
    }
    this.root.replaceChildren(style, element("div", { class: "lens inside" }, [...parts, captionList(data.caption)]));
    if (data.components) this.choose(this.strongest());
  }

  // The strongest heads, then the strongest of the others, each with its effect in words.
  buildRanking() {
    const { total, details, columns } = this.data.components;
    const all = total.flatMap((line, row) => line.map((score, column) => ({ row, column, score, one: details[row]?.[column] })));
    const list = (title, most, some) => {
      const best = some.filter(({ score }) => score).sort((a, b) => Math.abs(b.score) - Math.abs(a.score)).slice(0, most);
      const lines = best.map(({ row, column, score, one }) => {
        const act = element("button", { type: "button", class: "ranked", text: this.inWords(row, column, score, one) });
        act.addEventListener("click", () => this.choose([row, column]));
        return element("li", {}, [act]);
      });
      return lines.length ? [element("h3", { text: title }), element("ol", {}, lines)] : [];
    };
    const heads = all.filter(({ column }) => isHead(columns[column]));
    const others = all.filter(({ column }) => !isHead(columns[column]));
    return element("section", { class: "figure ranked-list" }, [...list("Strongest heads, over all tokens", MOST_HEADS, heads), ...list(heads.length ? "Strongest of the others" : "Strongest components", MOST_OTHERS, others)]);
  }

  // “block 9, head 3 reads “John”, writes “ Mary” up 0.80”; the first token, a likely sink, only if nothing else is read.
  inWords(row, column, score, one) {
    const words = one?.read ? this.data.words.map(([label, start, stop]) => ({ label, start, sum: one.read.slice(start, stop).reduce((sum, value) => sum + value, 0) })) : [];
    const strongest = (some) => some.reduce((best, word) => (Math.abs(word.sum) > Math.abs(best.sum) ? word : best));
    const others = words.filter(({ start, sum }) => start > 0 && sum);
    const reads = words.length ? ` reads “${visible(strongest(others.length ? others : words).label).trim()}”,` : "";
    const size = formatNumber(Math.abs(score), false);
    return `${this.label(row, column).replace("attention head", "head")}${reads} moves “${visible(this.data.target).replace(/\s+/g, " ").trim()}” ${score < 0 ? "down" : "up"} ${size}`;
  }

  // Columns: the heads of each block, then its feed-forward and whatever else it has.
  buildHeads() {
    const { blocks, columns } = this.data.components;
    const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": "Effect of each head and feed-forward by block" });
    this.heads = new Grid(canvas, { rows: blocks.map((n) => `${n}`), columns, isFlipped: true });
    this.heads.onPoint = (row, column) => (this.tip.textContent = this.describe(row, column));
    this.heads.onPick = (row, column) => this.choose([row, column]);
    const choose = element("select", { "aria-label": "Effects" }, ["total", "direct"].map((name) => element("option", { value: name, text: `${name} effects` })));
    choose.addEventListener("change", () => {
      this.effect = choose.value;
      this.paint();
    });
    this.scales = element("p", { class: "scales" });
    return element("section", { class: "figure" }, [element("h3", { text: "What each head and feed-forward does, by block" }), choose, canvas, this.scales]);
  }

  buildFlow() {
    const { flow } = this.data.components;
    const canvas = element("canvas", { role: "img", "aria-label": "Flow over depth and tokens" });
    this.flow = new Grid(canvas, { rows: flow.map((_, n) => `${n}`), columns: this.data.tokens.map(visible), isFlipped: true, isSlanted: true });
    this.flow.onPoint = (row, column) => {
      const score = formatNumber(flow[row][column], true);
      this.tip.textContent = `Entering block ${row}, token ${column} ${visible(this.data.tokens[column])}: carries ${score}`;
    };
    this.flowScale = element("p", { class: "scales" });
    return element("section", { class: "figure wide" }, [element("h3", { text: "Contribution of each token, by depth" }), canvas, this.flowScale]);
  }

  cells() {
    return this.data.components[this.effect];
  }

  describe(row, column) {
    const score = this.cells()[row][column];
    return score === null ? "" : `${this.label(row, column)}: ${formatNumber(score, true)} (${this.effect} effect, over all tokens)`;
  }

  label(row, column) {
    const { blocks, columns } = this.data.components;
    return `block ${blocks[row]}, ${isHead(columns[column]) ? `attention head ${columns[column]}` : columns[column]}`;
  }

  // The strongest head, since heads have readings; without heads, the strongest component.
  strongest() {
    let best = [0, 0];
    const { total: cells, columns } = this.data.components;
    cells.forEach((line, row) => line.forEach((score, column) => {
      if (columns.some(isHead) && !isHead(columns[column])) return;
      if (Math.abs(score ?? 0) > Math.abs(cells[best[0]][best[1]] ?? 0)) best = [row, column];
    }));
    return best;
  }

  choose([row, column]) {
    const one = this.data.components.details[row]?.[column];
    this.heads.mark = [row, column];
    this.chosen = { row, column };
    this.showAbout(this.label(row, column), one);
    this.graph?.choose((node) => node.name === this.label(row, column));
    this.paint();
  }

  chooseNode(node) {
    this.tip.textContent = `${node.name} at ${node.token} ${visible(this.data.tokens[node.token])}: ${formatNumber(node.value, true)}; constant ${formatNumber(node.constant, true)}; cut off ${formatNumber(node.cut, true)}`;
    if (!this.data.components) return;
    const { blocks, columns } = this.data.components;
    const row = blocks.indexOf(node.block);
    const column = columns.indexOf(node.column);
    if (row < 0 || column < 0) return;
    this.heads.mark = [row, column];
    this.chosen = { row, column };
    this.showAbout(this.label(row, column), this.data.components.details[row]?.[column]);
    this.paint();
  }

  showAbout(name, one) {
    const parts = [element("h3", { text: name })];
    if (one?.wrote) parts.push(this.text("Wrote at (total effect by token)", one.wrote));
    if (one?.read) parts.push(this.text("Read from (total effect by the token it attended to)", one.read));
    if (one?.look) parts.push(this.lookNode(one.look));
    if (one) parts.push(element("p", { class: "sum", text: `total effect ${formatNumber(one.total, true)}, direct effect ${formatNumber(one.direct, true)}` }));
    this.about.replaceChildren(...parts);
    const again = () => this.showAbout(name, one);
    this.host.dispatchEvent(new CustomEvent("tensorlens:component", { detail: { name, about: this.about, look: one?.look, again } }));
  }

  // Where the head attended for most of its effect, and the score behind that, pair by pair.
  lookNode(look) {
    const at = (token) => `${token} “${visible(this.data.tokens[token]).trim()}”`;
    const where = `At ${at(look.query)} it looked at ${at(look.key)} (attention ${(100 * look.attention).toFixed(0)} %); what it read there moved the target most.`;
    const parts = [element("span", { class: "name", text: "Why it looked there" }), element("p", { text: where })];
    if (look.why) parts.push(element("p", { text: `The score before softmax is ${formatNumber(look.why.score, true)}: the sum of all pairs of what the query read (rows) and what the key read (columns). Colours go up to the strongest pair that has names.` }), ...this.whyNodes(look));
    return element("div", { class: "look" }, parts);
  }

  whyNodes(look) {
    const tip = element("p", { class: "pair", text: this.strongestPair(look.why[this.by]) });
    const choose = element("select", { "aria-label": "Pairs" }, ["component", "token"].map((name) => element("option", { value: name, text: `pairs of ${name}s` })));
    choose.value = this.by;
    const canvas = element("canvas", { role: "img", "aria-label": "Pairs that made the score" });
    const draw = () => {
      const { rows, columns, cells } = look.why[this.by];
      const grid = new Grid(canvas, { rows: rows.map(briefly), columns: columns.map(briefly), isSlanted: true, left: 96 });
      grid.onPoint = (row, column) => (tip.textContent = pairText(rows[row], columns[column], cells[row][column]));
      grid.draw(cells, this.shade, Math.abs(strongestOf(look.why[this.by]).score));
    };
    choose.addEventListener("change", () => {
      this.by = choose.value;
      tip.textContent = this.strongestPair(look.why[this.by]);
      draw();
    });
    draw();
    return [choose, element("div", { class: "scrolls" }, [canvas]), tip];
  }

  strongestPair(table) {
    const { row, column, score } = strongestOf(table);
    return `Strongest pair: ${pairText(row, column, score)}`;
  }

  text(title, scores) {
    const limit = Math.max(...scores.map(Math.abs)) || 1;
    const colours = new Colours(true, this.shade);
    const tokens = this.data.tokens.map((token, j) => {
      const share = scores[j] / limit;
      const node = element("span", { class: "token", text: visible(token), title: formatNumber(scores[j], true) });
      node.style.background = colours.css(share);
      node.style.color = colours.inkOn(share);
      return node;
    });
    return element("div", { class: "reads" }, [element("span", { class: "name", text: title }), element("p", { class: "tokens", dir: directionOf(this.data.tokens) }, tokens)]);
  }

  reshade() {
    this.shade = shadeAround();
    this.host.dataset.shade = this.shade;
    this.paint();
    if (this.chosen) this.showAbout(this.label(this.chosen.row, this.chosen.column), this.data.components.details[this.chosen.row]?.[this.chosen.column]);
    this.graph?.reshade(this.shade);
  }

  // Heads and the others have a scale each: a feed-forward is often many times as strong as a head.
  paint() {
    if (!this.data.components) return;
    this.heads.draw(this.cells(), this.shade, 0, this.data.components.columns.map(isHead));
    this.scales.replaceChildren(...this.heads.limits.filter(([, limit]) => limit).map(([ofHeads, limit]) => scaleOf(ofHeads ? "heads" : "feed-forwards", limit, this.shade)));
    this.flow.draw(this.data.components.flow, this.shade);
    this.flowScale.replaceChildren(scaleOf("", this.flow.limits[0][1], this.shade));
  }
}

// A colour bar with its ends.
function scaleOf(name, limit, shade) {
  const ends = [-limit, limit].map((end) => formatNumber(end, true));
  const bar = element("i", { class: "scale", role: "img", "aria-label": `Colours from ${ends.join(" to ")}` });
  bar.style.background = new Colours(true, shade).gradient();
  return element("span", {}, [`${name} ${ends[0]} `, bar, ` ${ends[1]}`]);
}

// The strongest pair with a name on both sides; unnamed sums of many weak pairs may be larger.
function strongestOf({ rows, columns, cells }) {
  const isNamed = (name) => !/^\d+ others$/.test(name);
  let best = { row: rows[0], column: columns[0], score: 0 };
  rows.forEach((row, i) => columns.forEach((column, j) => {
    if (isNamed(row) && isNamed(column) && Math.abs(cells[i][j]) > Math.abs(best.score)) best = { row, column, score: cells[i][j] };
  }));
  return best;
}

function pairText(row, column, score) {
  return `query ${visible(row)} × key ${visible(column)}: ${formatNumber(score, true)}`;
}

// Names of components as short as a picture needs them.
function briefly(name) {
  const short = visible(name).replace(/^block (\d+), /, "$1 ").replace("attention head ", "head ").replace("feed-forward", "ff");
  return shorten(short.replace(/^(\d+) head /, "$1."), 14);
}
