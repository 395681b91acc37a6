// An answer as text: click a part to highlight the passages it is based on, or a passage to highlight its parts.

const LONGEST_PASSAGE = 110;

class AnswerText {
  constructor(lens) {
    this.lens = lens;
    this.data = lens.data.answer;
    this.row = null; // null is the whole answer
    this.column = null;
    this.says = element("p", { class: "answer-says", "aria-live": "polite" });
    this.whole = button("Whole answer", "What the whole answer is based on", () => this.choose({}));
    this.prompt = this.text("Prompt", this.data.prompt.map(([text, j]) => ({ text, j })));
    this.answer = this.text("Answer", this.data.answer.map(([text, i, j]) => ({ text, i, j })));
    this.table = element("table", { class: "passages" });
    const against = this.data.against === null ? [] : [element("p", { class: "against" }, ["Rather than ", element("bdi", { text: `“${visible(this.data.against.trim())}”` })])];
    this.pictures = new Pictures(this.data.pictures, (column) => this.toggle({ column }));
    const seen = this.data.pictures.length ? [this.pictures.node] : [];
    const texts = element("div", { class: "answer-texts" }, [element("h3", { text: "Prompt" }), ...seen, this.prompt.node, element("h3", { text: "Answer" }), this.answer.node, ...against]);
    const side = element("div", { class: "answer-side" }, [element("div", { class: "answer-head" }, [this.says, this.whole]), this.table]);
    this.node = element("section", { class: "answer", "aria-label": "Prompt and answer" }, [texts, side]);
  }

  text(label, pieces) {
    const node = element("div", { class: "answer-text", role: "group", "aria-label": label, dir: directionOf([pieces.map(({ text }) => text).join("")]) });
    const spans = pieces.map(({ text, i = null, j = null }) => {
      // Line breaks of a text are kept; every other invisible character has a sign.
      const shown = text.split("\n").map((line) => (line === "" || /^ +$/.test(line) ? line : visible(line))).join("\n");
      const isPart = i !== null && i !== undefined;
      const isPassage = !isPart && j !== null && j !== undefined;
      const span = element("span", { class: isPart ? "part" : isPassage ? "passage" : "between", text: shown });
      if (isPart || isPassage) this.listen(span, isPart ? { row: i } : { column: j });
      return { span, i: isPart ? i : null, j: j ?? null };
    });
    node.append(...spans.map(({ span }) => span));
    return { node, spans };
  }

  listen(span, choice) {
    span.setAttribute("role", "button");
    span.setAttribute("tabindex", "0");
    span.addEventListener("click", () => this.toggle(choice));
    span.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.toggle(choice);
    });
  }

  // The same click again clears the choice.
  toggle({ row = null, column = null }) {
    this.choose(row === this.row && column === this.column ? {} : { row, column });
  }

  choose({ row = null, column = null }) {
    this.row = row;
    this.column = column;
    if (row !== null) this.lens.select({ i: row, j: this.lens.cursor.j });
    this.paint();
  }

  rows() {
    return this.row === null ? Array.from({ length: this.lens.nOut }, (_, i) => i) : [this.row];
  }

  // A sum of rows is the row of their parts together.
  score(j) {
    return this.rows().reduce((sum, i) => sum + this.lens.scores.at(i, j), 0);
  }

  total(numbers) {
    return numbers === null ? null : this.rows().reduce((sum, i) => sum + numbers[i], 0);
  }

  paint() {
    const { lens } = this;
    const { aside } = lens.scores;
    const columns = Array.from({ length: lens.nIn }, (_, j) => j);
    const scores = columns.map((j) => this.score(j));
    const limit = Math.max(...columns.filter((j) => !aside.has(j)).map((j) => Math.abs(scores[j]) || 0)) || 1;
    const strongest = Math.max(...lens.data.outTokens.map((_, i) => (this.column === null ? 0 : Math.abs(lens.scores.at(i, this.column)) || 0))) || 1;
    const shareOf = ({ i, j }) => {
      if (this.column !== null) return i === null ? NaN : lens.scores.at(i, this.column) / strongest;
      return j === null || aside.has(j) ? NaN : scores[j] / limit;
    };
    for (const piece of [...this.prompt.spans, ...this.answer.spans]) this.colour(piece, shareOf(piece), aside);
    this.pictures.paint((j) => (this.column === null ? scores[j] : j === this.column ? scores[j] : 0), lens.colours, this.column);
    this.say();
    this.fill(columns, scores, aside);
  }

  colour({ span, i, j }, share, aside) {
    const isBlank = Number.isNaN(share) || share === 0;
    span.style.backgroundColor = isBlank ? "" : this.lens.colours.css(share);
    span.style.color = isBlank ? "" : this.lens.colours.inkOn(share);
    span.classList.toggle("aside", i === null && j !== null && aside.has(j));
    const isChosen = (i !== null && i === this.row) || (i === null && j !== null && j === this.column);
    span.classList.toggle("chosen", isChosen);
    if (span.hasAttribute("role")) span.setAttribute("aria-pressed", String(isChosen));
  }

  say() {
    const { inTokens, outTokens } = this.lens.data;
    const name = (label) => element("bdi", { text: `“${shorten(visible(label.trim()), 60)}”` });
    this.whole.hidden = this.row === null && this.column === null;
    if (this.column !== null) this.says.replaceChildren("What ", name(inTokens[this.column]), " supports, part by part");
    else if (this.row !== null && this.lens.nOut > 1) this.says.replaceChildren("What ", name(outTokens[this.row]), " is based on");
    else this.says.textContent = this.data.against === null ? "What the whole answer is based on" : "Why this answer rather than the other";
  }

  // Passages by size, below them the tokens set aside and the bias, and the sum of everything.
  fill(columns, scores, aside) {
    const bias = this.total(this.data.bias);
    const all = scores.reduce((sum, score) => sum + Math.abs(score), Math.abs(bias ?? 0)) || 1;
    const like = Math.max(...scores.map(Math.abs), 1e-9);
    const { inTokens, outTokens } = this.lens.data;
    const line = (label, score, kind, act = null) => {
      const name = element(act ? "button" : "span", { class: "name", ...(act ? { type: "button" } : {}), text: shorten(visible(label.trim() || label), LONGEST_PASSAGE) });
      if (act) name.addEventListener("click", act);
      const cells = [formatNumber(score, true, like), signedShare(score, all)];
      return element("tr", { class: kind }, [element("th", { scope: "row" }, [name]), ...cells.map((text) => element("td", { text }))]);
    };
    const head = (what) => element("tr", {}, [what, "score", "share"].map((text) => element("th", { scope: "col", text })));
    if (this.column !== null) {
      const parts = outTokens.map((label, i) => [label, this.lens.scores.at(i, this.column), i]);
      const sum = parts.reduce((total, [, score]) => total + Math.abs(score), 0) || 1;
      const rows = parts.map(([label, score, i]) => {
        const row = line(label, score, "", () => this.choose({ row: i }));
        row.lastChild.textContent = signedShare(score, sum);
        return row;
      });
      this.table.replaceChildren(element("thead", {}, [head("part of the answer")]), element("tbody", {}, rows));
      return;
    }
    const order = columns.filter((j) => !aside.has(j) && this.pictures.holds(j) < 0).sort((a, b) => Math.abs(scores[b]) - Math.abs(scores[a]) || a - b);
    const isOwn = (j) => this.answer.spans.some((one) => one.j === j);
    const name = (j) => (isOwn(j) && inTokens[j] === "answer" ? "the answer before each word" : inTokens[j]);
    const rows = order.map((j) => line(name(j), scores[j], "", () => this.choose({ column: j })));
    this.pictures.pictures.forEach(({ columns: parts }, k) => {
      const sum = [...parts].reduce((total, j) => total + scores[j], 0);
      rows.push(line(`Image ${this.pictures.pictures.length > 1 ? k + 1 : ""} (${parts.size} parts)`, sum, "image"));
    });
    rows.push(...[...aside].map((j) => line(`Set aside: ${visible(inTokens[j])}`, scores[j], "set-aside")));
    if (bias !== null) rows.push(line("Bias", bias, "bias"));
    const value = this.total(this.data.values);
    if (value !== null) rows.push(element("tr", { class: "sum-line" }, [element("th", { scope: "row", text: "Sum: the target" }), element("td", { text: formatNumber(value, true, like) }), element("td")]));
    this.table.replaceChildren(element("thead", {}, [head("passage")]), element("tbody", {}, rows));
  }
}

function signedShare(score, total) {
  const size = ((100 * Math.abs(score)) / total).toFixed(1);
  return size === "0.0" ? "0.0 %" : `${score < 0 ? "−" : "+"}${size} %`;
}
