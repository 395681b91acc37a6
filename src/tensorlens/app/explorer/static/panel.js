// One side of the explorer: an input, the controls and the map.

import { ask, uploadImage } from "./api.js";
import { Asking, textArea } from "./asking.js";
import { blockRange, choice, field, group, headGrid, methodChoice, percent, targets } from "./controls.js";
import { InsidePanel } from "./inside_panel.js";
import { Result } from "./result.js";
import { asCommand, asPython } from "./snippets.js";
import { question } from "./state.js";

const { element, button, visible, shorten } = window.TensorLens;
const CLASS_METHOD = "tensor.in_class";
const STATE_METHOD = "tensor.in_out";
export const EXAMPLES = [
  "The Eiffel Tower is located in the city of",
  "Anna put the keys in the drawer. Later, to find the keys, she opened the",
  "One, two, three, four,",
];

export class Panel extends Asking {
  constructor(catalogue, view, { onChange, onSelect, onCopy, onMap = () => {} }) {
    super();
    this.catalogue = catalogue;
    this.view = view;
    Object.assign(this, { onChange, onMap });
    this.input = { predictions: [], tokens: [], n_blocks: 1, n_heads: [], pools: false };
    const snippet = (make) => () => onCopy(make({ ...this.mapped, rules: this.mapped.rules ?? this.input.rules, output: this.view.output }));
    this.result = new Result({ onSelect: (output) => this.selected(output, () => onSelect(this, output)), copies: [["Python", snippet(asPython)], ["Command", snippet(asCommand)]] });
    this.inside = new InsidePanel(() => question(this.mapped));
    this.build();
    this.show();
  }

  build() {
    const { models, methods, rules } = this.catalogue;
    this.model = choice("Model", models, (name) => this.useModel(name));
    this.method = methodChoice(methods, (name) => this.change({ method: name, ...(this.takesTarget(name) ? {} : { target: null, against: null }) }));
    this.rules = choice("Rules", [{ name: "", title: this.catalogue.is_recommended ? "recommended" : "default" }, ...rules.map((name) => ({ name, title: name }))], (name) => this.change({ rules: name || null }));
    this.outputs = choice("Outputs", [{ name: "every", title: "every output" }, { name: "one", title: "the selected one" }], (value) => this.change({ every: value === "every" }));
    this.targets = targets((change) => this.pick(change));
    this.blocks = blockRange((change) => this.change({ ...change, heads: inRange(this.view.heads, change.blocks) }));
    this.heads = headGrid((change) => this.change(change));
    this.summary = element("p", { class: "summary" });
    this.more = [group("Blocks", this.blocks.node), group("Heads", this.heads.node), ...this.targets.nodes];
    const rest = element("div", { class: "fields" }, [field("Method", this.method.node), field("Rules", this.rules.node), field("Outputs", this.outputs.node), ...this.more.slice(0, 2), this.summary, this.buildExamples()]);
    this.folded = element("details", { class: "more" }, [element("summary", { text: "More", title: "Method, rules, outputs, blocks, heads, examples" }), rest]);
    const fields = element("div", { class: "fields first" }, [field("Model", this.model.node), ...this.targets.nodes]);
    this.welcome = element("div", { class: "card welcome" }, [element("strong", { text: "Which inputs made this output?" }), element("span", { text: "Type a text or drop an image, then press Map." })]);
    const card = element("section", { class: "card ask", "aria-label": "Question" }, [this.buildComposer(), fields, element("div", { class: "foot" }, [this.folded, this.progress])]);
    this.ask = card;
    this.node = element("article", { class: "panel" }, [card, this.error, this.result.node, this.inside.node, this.welcome]);
  }

  buildComposer() {
    const write = (text) => {
      this.view.text = text;
      this.showAge();
    };
    this.text = textArea("Text", { placeholder: "Type a text, or drop an image here", rows: "1" }, { write, send: () => this.run() });
    this.text.addEventListener("paste", (event) => this.take(event.clipboardData?.files, event));
    this.thumbnail = element("img", { alt: "The picture to explain" });
    this.picture = element("div", { class: "image-input", hidden: "" }, [this.thumbnail, button("Remove", "Remove the picture", () => this.dropImage())]);
    const input = element("input", { type: "file", accept: "image/*", "aria-label": "Choose a picture" });
    input.addEventListener("change", () => this.take(input.files));
    this.go = element("button", { type: "button", class: "main", text: "Map", title: "Enter; Shift+Enter begins a new line" });
    this.go.addEventListener("click", () => this.run());
    const file = element("label", { class: "file" }, ["Image…", input]);
    const composer = element("div", { class: "composer" }, [element("div", {}, [this.text, this.picture]), element("div", { class: "buttons" }, [this.go, file])]);
    for (const kind of ["dragover", "dragleave", "drop"]) {
      composer.addEventListener(kind, (event) => {
        event.preventDefault();
        composer.classList.toggle("over", kind === "dragover");
        if (kind === "drop") this.take(event.dataTransfer?.files);
      });
    }
    return composer;
  }

  buildExamples() {
    const chip = (text) => {
      const node = element("button", { type: "button", class: "chip example", text: shorten(text, 48), title: text });
      node.addEventListener("click", () => this.tryText(text));
      return node;
    };
    this.examples = element("div", { class: "chips examples", role: "group", "aria-label": "Examples" }, [element("span", { class: "label", text: "Try" }), ...EXAMPLES.map(chip)]);
    return this.examples;
  }

  tryText(text) {
    this.text.value = text;
    Object.assign(this.view, { text, target: null, against: null, output: null });
    this.run();
  }

  // A map of a text that was edited since is dimmed, and so are its predictions.
  showAge() {
    this.node.classList.toggle("stale", this.mapped !== undefined && !this.isSameInput(this.mapped));
    for (const node of this.targets.nodes) node.classList.toggle("old", this.known !== undefined && !this.isSameInput(this.known));
  }

  takesTarget(name) {
    return this.catalogue.methods.find((method) => method.name === name)?.takes_target ?? false;
  }

  // State to screen.
  show() {
    const { view, input } = this;
    if (document.activeElement !== this.text) this.text.value = view.text;
    this.text.hidden = this.examples.hidden = view.image !== null;
    this.showAge();
    this.picture.hidden = view.image === null;
    this.thumbnail.hidden = !this.thumbnail.hasAttribute("src");
    this.model.show(view.model);
    this.method.show(view.method ?? CLASS_METHOD);
    this.rules.show(view.rules ?? "");
    this.outputs.show(view.every ? "every" : "one");
    const method = this.catalogue.methods.find(({ name }) => name === (view.method ?? CLASS_METHOD));
    this.summary.replaceChildren(element("code", { text: method.name }), ` ${method.summary}`);
    for (const node of this.more) node.hidden = !input.tokens.length;
    if (!input.tokens.length) return;
    this.blocks.show(view, input.n_blocks);
    this.heads.show(view, input.n_heads);
    const implied = this.takesTarget(view.method) ? (input.predictions[0] ?? null) : null;
    this.targets.show(view, { ...input, output: view.output ?? input.out_token, implied });
    this.result.say(this.saying());
  }

  // The model's own prediction, unless the headline is about it.
  saying() {
    const [first] = this.input.predictions;
    const isTold = this.view.target === null && this.takesTarget(this.view.method);
    return first && this.view.saved === null && !isTold ? [`“${shorten(visible(first.name), 40)}”`, percent(first.probability)] : null;
  }

  // A change of the question is answered at once: the model pass is kept.
  change(change) {
    Object.assign(this.view, change);
    this.show();
    if (this.input.tokens.length && this.isOfSameInput()) this.run();
    else this.onChange();
  }

  isSameInput(other) {
    const { model, text, image } = this.view;
    return other.model === model && other.image === image && (image !== null || other.text === text);
  }

  isOfSameInput() {
    return this.asked !== undefined && this.isSameInput(this.asked);
  }

  pick(change) {
    const isWhole = this.view.blocks === null || this.view.blocks[1] === this.input.n_blocks;
    const method = change.target === null ? {} : this.takesTarget(this.view.method) ? {} : { method: CLASS_METHOD, ...(isWhole ? {} : { blocks: null }) };
    const back = change.target === null && this.takesTarget(this.view.method) ? { method: STATE_METHOD } : {};
    this.change({ ...change, ...method, ...back });
  }

  // Choices for one model (blocks, heads, classes) may not exist in another.
  changeModel(name) {
    const isPlain = this.view.method === STATE_METHOD || this.takesTarget(this.view.method);
    Object.assign(this.view, { model: name, ...(isPlain ? { method: null, every: true } : {}), target: null, against: null, blocks: null, heads: {}, output: null });
  }

  useModel(name) {
    this.changeModel(name);
    this.input = { ...this.input, tokens: [], predictions: [] };
    this.show();
    if (this.asked) this.run();
    else this.onChange();
  }

  // Pictures.
  async take(files, event) {
    const file = [...(files ?? [])].find((one) => one.type.startsWith("image/"));
    if (!file) return;
    event?.preventDefault();
    try {
      const image = await uploadImage(file);
      this.thumbnail.src = URL.createObjectURL(file);
      await this.useImageModel();
      Object.assign(this.view, { image, target: null, against: null, output: null });
      this.show();
      this.run();
    } catch (error) {
      this.fail(error);
    }
  }

  // A dropped picture goes to a model that takes pictures, if there is one.
  async useImageModel() {
    const kinds = new Map(this.catalogue.models.map((model) => [model.name, model.kind]));
    const order = [this.view.model, ...[...kinds.keys()].filter((name) => name !== this.view.model)];
    for (const name of order) {
      const kind = kinds.get(name) ?? (await this.open(name));
      if (kind !== "image") continue;
      if (name !== this.view.model) this.changeModel(name);
      return;
    }
  }

  async open(name) {
    const { kind } = await ask("/api/open", { model: name }, { hear: (event) => this.hear(event) });
    this.catalogue.models.find((model) => model.name === name).kind = kind;
    this.rest();
    return kind;
  }

  // The first thing a visitor sees is an answer; a model of pictures has to wait for one.
  async greet() {
    const { model, text } = this.view;
    const known = this.catalogue.models.find(({ name }) => name === model);
    try {
      const kind = known.kind ?? (await this.open(model));
      const isUntouched = this.asked === undefined && this.view.text === text && this.view.model === model;
      if (kind === "text" && isUntouched) await this.run();
    } catch (error) {
      this.fail(error);
    }
  }

  dropImage() {
    this.thumbnail.removeAttribute("src");
    Object.assign(this.view, { image: null, target: null, against: null, output: null });
    this.show();
    this.onChange();
  }

  // Asking.
  stop() {
    super.stop();
    this.inside.stop();
  }

  async run() {
    if (this.asked && !this.isOfSameInput()) this.view.output = null;
    this.asked = { ...this.view };
    this.showAge();
    this.welcome.hidden = true;
    await this.put("/api/map", question(this.view));
  }

  hear(event) {
    if (event.type === "input") this.learn(event);
    if (event.type === "map") this.answered(event);
    if (event.type === "preview") {
      this.mapped = this.asked;
      this.result.show(event.map, { output: this.view.output, isPreview: true });
      this.showAge();
    }
    super.hear(event);
  }

  // If a question is refused, the chips show the target of the map again.
  fail(error) {
    if (this.mapped && this.isSameInput(this.mapped)) {
      const { method, target, against } = this.mapped;
      Object.assign(this.view, { method, target, against });
    }
    super.fail(error);
    this.show();
  }

  answered({ map, result }) {
    this.result.show(map, { output: this.view.output });
    this.result.offer(result, this.seconds);
    if (map.image && this.thumbnail.hidden) this.thumbnail.src = map.image; // of a link, or of another panel
    this.view.output = this.result.output;
    this.mapped = Object.assign(this.asked, { method: this.view.method, every: this.view.every });
    this.inside.offer(this.input.predictions.length > 0);
    this.show();
    this.onMap();
  }

  // A link names a model that this explorer was not started with.
  offerOther(missing) {
    const { model } = this.view;
    const offer = (text, act) => this.error.append(" ", button(text, text, act));
    this.fail(new Error(`This link is about ${missing}, which is not loaded here. Load it now, or start the explorer with it: tensorlens explore ${missing}`));
    offer(`Load ${visible(missing)}`, () => this.load(missing));
    if (model !== null) offer(`Ask ${visible(model)} instead`, () => this.run());
  }

  async load(name) {
    this.error.hidden = true;
    try {
      const { kind } = await ask("/api/add", { model: name }, { hear: (event) => this.hear(event) });
      if (!this.catalogue.models.some((one) => one.name === name)) {
        this.catalogue.models.push({ name, kind, answers: null });
        this.model.node.append(element("option", { value: name, text: visible(name) }));
      }
      this.view.model = name;
      this.show();
      await this.run();
    } catch (error) {
      this.fail(error);
    }
  }

  learn(event) {
    this.input = event;
    this.known = this.asked;
    this.view.output ??= event.out_token;
    if (this.view.method === null) Object.assign(this.view, { method: event.method, every: event.every });
    this.show();
  }

  // A click on an output: its predictions, and its row if only one is shown.
  selected(output, tell) {
    this.view.output = output;
    tell();
    this.onChange();
    if (this.view.saved !== null || this.input.pools) return;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.predict(output), 150);
  }

  async predict(output) {
    if (!this.isOfSameInput() || !this.input.predictions.length) return;
    const { model, text, image, rules } = this.view;
    try {
      const { predictions } = await ask("/api/predictions", { model, rules, ...(image ? { image } : { text }), out_token: output });
      this.input = { ...this.input, predictions, out_token: output };
      this.show();
    } catch {
      // The chips of the previous output stay; the map does not change.
    }
  }

  // A map that was saved earlier: no model behind it, so nothing to ask.
  showSaved(found, title) {
    this.stop();
    this.ask.hidden = true;
    this.welcome.hidden = true;
    this.error.hidden = true;
    this.result.show(found.map, { output: this.view.output });
    this.result.offer(found.result);
    this.result.finish(found);
    this.result.origin.textContent = visible(title);
    this.result.copies.hidden = true;
    this.inside.offer(false);
  }
}

function inRange(heads, blocks) {
  if (blocks === null) return heads;
  return Object.fromEntries(Object.entries(heads).filter(([block]) => block >= blocks[0] && block < blocks[1]));
}
