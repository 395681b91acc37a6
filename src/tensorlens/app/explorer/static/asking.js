// The part that all pages share: one question at a time, its progress and its errors.

import { ask } from "./api.js";

const { element, button, visible } = window.TensorLens;

export class Asking {
  constructor() {
    this.stage = element("span", { class: "stage", role: "status" });
    this.left = element("span", { class: "left" });
    this.meter = element("progress", { max: "1", "aria-label": "Progress" });
    this.progress = element("div", { class: "card progress", hidden: "" }, [this.stage, this.meter, this.left, button("Cancel", "Stop the work", () => this.stop())]);
    this.error = element("div", { class: "card error", role: "alert", hidden: "" });
  }

  // Ask, receive every event, and finish with the last; a newer question replaces this one.
  async put(path, question) {
    this.stop();
    const mine = (this.running = new AbortController());
    this.began = performance.now();
    this.error.hidden = true;
    this.hear({ type: "progress", stage: "Asking" });
    try {
      this.result.finish(await ask(path, question, { signal: mine.signal, hear: (event) => this.hear(event) }));
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      if (this.running === mine) this.rest();
      this.onChange();
    }
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }

  hear(event) {
    if (event.type === "waiting") this.say(event.stage ? `Waiting: ${event.stage}` : "Waiting");
    if (["Model pass", "Answering"].includes(event.stage)) this.began = performance.now(); // not while it waited or loaded
    if (event.type === "progress") this.say(event.stage, event.part);
  }

  // How far a stage is, and the time left at the speed so far, once that is known.
  timeLeft(stage, part) {
    if (this.told !== stage) Object.assign(this, { told: stage, since: performance.now() });
    const seconds = ((performance.now() - this.since) * (1 / part - 1)) / 1000;
    return part > 0.02 ? `${Math.round(100 * part)} %, about ${Math.ceil(seconds)} s left` : "";
  }

  say(text, part = null) {
    this.progress.hidden = false;
    this.result.node.classList.add("asking");
    if (this.stage.textContent !== visible(text)) this.stage.textContent = visible(text); // read aloud when it changes
    this.left.textContent = this.timeLeft(text, part);
    if (part === null) this.meter.removeAttribute("value");
    else this.meter.value = part;
  }

  rest() {
    this.progress.hidden = true;
    this.result.node.classList.remove("asking");
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.rest();
  }

  fail(error) {
    this.rest();
    this.error.textContent = visible(error.message).replaceAll("⏎", "\n");
    this.error.hidden = false;
  }
}

// A text to write in; Enter asks, Shift+Enter begins a line. The Enter that ends a word of an input method does neither.
export function textArea(label, options, { write, send }) {
  const node = element("textarea", { "aria-label": label, spellcheck: "false", dir: "auto", ...options });
  node.addEventListener("input", () => write(node.value));
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  return node;
}
