// The third page: two texts, and the pairs of words that make them similar.

import { Asking, textArea } from "./asking.js";
import { choice, field } from "./controls.js";
import { FormLink } from "./state.js";

const { element, button, Pairs } = window.TensorLens;
const GROUPS = ["words", "sentences", "lines", "tokens"];
const FRESH = { model: null, first: "A man is playing a guitar.", second: "Someone plays an instrument.", against: "", groups: "words" };

export const SIMILAR_LINK = new FormLink("similar", "first", FRESH, { groups: GROUPS });

export class SimilarPanel extends Asking {
  constructor(catalogue, view, { onChange }) {
    super();
    const named = catalogue.models.map(({ name }) => name);
    this.view = { ...view, model: named.includes(view.model) ? view.model : (named[0] ?? null) };
    this.onChange = onChange;
    this.result = { node: element("div", { class: "card pairs-result", hidden: "" }), finish: ({ pairs }) => this.show(pairs) };
    this.build(named);
  }

  build(named) {
    const areas = [["first", "First text", ""], ["second", "Second text", ""], ["against", "Rather than", "A third text, for a contrast"]];
    const texts = areas.map(([name, label, placeholder]) => {
      const write = (text) => Object.assign(this.view, { [name]: text }) && this.onChange();
      const node = textArea(label, { placeholder, rows: "2" }, { write, send: () => this.run() });
      node.value = this.view[name];
      return field(label, node);
    });
    const pick = (label, name, options) => {
      const made = choice(label, options.map((value) => ({ name: value, title: value })), (value) => this.change({ [name]: value }));
      made.show(this.view[name]);
      return field(label, made.node);
    };
    const go = button("Compare", "Compare: which pairs of words make them similar?", () => this.run());
    go.className = "main";
    const fields = element("div", { class: "fields" }, [pick("Model", "model", named), pick("Parts", "groups", GROUPS), go]);
    const form = element("form", { class: "card ask" }, [element("div", { class: "texts" }, texts), fields]);
    form.addEventListener("submit", (event) => event.preventDefault());
    this.node = element("section", { class: "panel similar-panel" }, [form, this.progress, this.error, this.result.node]);
  }

  change(change) {
    Object.assign(this.view, change);
    this.onChange();
    if (this.asked) this.run();
  }

  async run() {
    this.asked = true;
    const { model, first, second, against, groups } = this.view;
    await this.put("/api/similar", { model, first, second, against: against || null, groups });
  }

  show(pairs) {
    const host = element("div", { class: "embedded" });
    this.result.node.replaceChildren(host);
    this.result.node.hidden = false;
    new Pairs(host, pairs);
  }
}
