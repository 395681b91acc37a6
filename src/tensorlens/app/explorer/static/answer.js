// The second page: a prompt, the model's answer, and the parts of the prompt that the answer is based on.

import { Asking, textArea } from "./asking.js";
import { choice, field } from "./controls.js";
import { Result } from "./result.js";
import { FormLink } from "./state.js";

const { element, visible, button } = window.TensorLens;
const EXAMPLE = "Anna lives in Rome. Bob lives in Berlin. The weather was fine on Monday.\n\nQuestion: Where does Bob live?\nAnswer: Bob lives in";
const GROUPS = [["sentences", "sentences"], ["lines", "lines"], ["words", "words"], ["tokens", "tokens"], ["turns", "turns of the chat"]];
const ROWS = [["sentences", "sentences"], ["words", "words"], ["tokens", "tokens"], ["answer", "the whole answer"]];
const FRESH = { model: null, prompt: EXAMPLE, answer: "", against: "", groups: "sentences", rows: "sentences", rules: "", chat: false, length: 32 };

const VALUES = Object.fromEntries(Object.entries({ groups: GROUPS, rows: ROWS }).map(([name, known]) => [name, known.map(([value]) => value)]));
export const ANSWER_LINK = new FormLink("answer", "prompt", FRESH, VALUES);

const literal = (text) => JSON.stringify(text);

function asPython(view) {
  const prompt = view.chat ? `[{"role": "user", "content": ${literal(view.prompt)}}]` : literal(view.prompt);
  const options = view.answer ? literal(view.answer) : `max_new_tokens=${view.length}`;
  const rows = view.against ? `against=${literal(view.against)}` : `rows=${literal(view.rows)}`;
  return ["import tensorlens as tl", "", `lens = tl.load(${literal(view.model)}, rules=${view.rules ? literal(view.rules) : 'tl.recommended("passage")'})`, `answer = lens.answer(${prompt}, ${options})`, `answer.map(${literal(view.groups)}, ${rows})`, ""].join("\n");
}

export class AnswerPanel extends Asking {
  constructor(catalogue, view, { onChange, onCopy }) {
    super();
    this.models = catalogue.models.filter(({ answers }) => answers !== false);
    this.view = { ...view, model: this.models.some(({ name }) => name === view.model) ? view.model : (this.models[0]?.name ?? null) };
    this.onChange = onChange;
    this.result = new Result({ onSelect: () => {}, copies: [["Python", () => onCopy(asPython(this.view))]] });
    this.build(catalogue);
  }

  build({ rules }) {
    const { view, models } = this;
    this.prompt = this.area("prompt", "Prompt", "Type a prompt");
    this.answer = this.area("answer", "Answer", "Leave empty to let the model answer");
    this.against = this.area("against", "Rather than", "A different answer, for a contrast");
    const pick = (label, name, options) => {
      const made = choice(label, options.map(([value, title]) => ({ name: value, title })), (value) => this.change({ [name]: value }));
      made.show(view[name]);
      return field(label, made.node);
    };
    this.go = button("Answer", "Answer: let the model answer, and trace the answer back to the prompt", () => this.run());
    this.go.className = "main";
    const chat = element("input", { type: "checkbox", "aria-label": "As a chat" });
    chat.checked = view.chat;
    chat.addEventListener("change", () => Object.assign(view, { chat: chat.checked }) && this.onChange());
    const length = element("input", { type: "number", min: "1", max: "512", value: String(view.length), "aria-label": "Longest answer, in tokens" });
    length.addEventListener("change", () => Object.assign(view, { length: Math.min(Math.max(Math.round(Number(length.value)) || 1, 1), 512) }) && this.onChange());
    const fields = element("div", { class: "fields" }, [pick("Model", "model", models.map(({ name }) => [name, name])), pick("Passages", "groups", GROUPS)]);
    const others = element("div", { class: "fields" }, [
      pick("Parts of the answer", "rows", ROWS),
      pick("Rules", "rules", [["", "recommended"], ...rules.map((name) => [name, name])]),
      field("Longest answer, in tokens", length),
      field("As a chat", chat),
    ]);
    const composer = element("div", { class: "composer" }, [field("Prompt", this.prompt, "wide"), element("div", { class: "buttons" }, [this.go])]);
    const given = element("div", { class: "given" }, [field("Answer to explain", this.answer), field("Rather than", this.against)]);
    const more = element("details", { class: "more" }, [element("summary", { text: "More", title: "An answer of your own, a contrast, parts, rules, length, chat" }), given, others]);
    more.open = window.innerWidth > 640 || Boolean(view.answer || view.against);
    this.said = element("div", { class: "card said", "aria-live": "polite", "aria-label": "What the model says", hidden: "" });
    this.welcome = element("div", { class: "card welcome" }, [element("strong", { text: "Which parts of the prompt made this answer?" }), element("span", { text: "Write a prompt, or take this one, then press Answer." })]);
    this.node = element("section", { class: "panel answer-panel" }, [element("form", { class: "card ask" }, [composer, fields, more]), this.progress, this.error, this.said, this.result.node, this.welcome]);
    this.node.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  }

  area(name, label, placeholder) {
    const write = (text) => {
      this.view[name] = text;
      this.onChange();
    };
    const node = textArea(label, { placeholder, rows: name === "prompt" ? "6" : "2" }, { write, send: () => this.run() });
    node.value = this.view[name];
    return node;
  }

  // Different passages or parts of the same answer need no new model pass.
  change(change) {
    Object.assign(this.view, change);
    this.onChange();
    if (this.asked && !("model" in change)) this.run();
  }

  question() {
    const { model, prompt, answer, against, groups, rows, rules, chat, length } = this.view;
    return { model, rules: rules || null, prompt, answer: answer || null, against: against || null, groups, rows, is_chat: chat, max_new_tokens: length };
  }

  async run() {
    this.asked = true;
    this.welcome.hidden = true;
    await this.put("/api/answer", this.question());
  }

  hear(event) {
    if (event.type === "said") {
      this.said.hidden = false;
      this.said.textContent = event.text.split("\n").map((line) => (line ? visible(line) : line)).join("\n");
    }
    if (event.type === "map") {
      this.said.hidden = true; // it is in the result
      this.result.show(event.map);
      this.result.offer(event.result, this.seconds);
    }
    super.hear(event);
  }

  fail(error) {
    super.fail(error);
    this.said.hidden = true;
  }
}
