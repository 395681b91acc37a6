// From a map to where in the model: heads, flow and graph of the same question, and the model without one of them.

import { ask } from "./api.js";
import { Asking } from "./asking.js";
import { field, percent } from "./controls.js";

const { element, button, visible, formatNumber, Inside } = window.TensorLens;

// A button, the progress and errors of its work below it, and the answer.
class Part extends Asking {
  constructor(text, label, act) {
    super();
    this.button = button(text, `${text}: ${label}`, act);
    this.onChange = () => {};
    this.clear();
  }

  clear() {
    const node = element("div", { class: "inside-host embedded", tabindex: "-1" });
    this.result?.node.replaceWith(node);
    this.result = { node };
    this.stop();
    this.error.hidden = true;
    this.button.hidden = false;
  }

  get nodes() {
    return [this.button, this.progress, this.error, this.result.node];
  }
}

export class InsidePanel {
  constructor(question) {
    this.question = question;
    this.inside = new Part("Look inside", "heads, feed-forwards, the flow over depth, and the graph of this target", () => this.open());
    this.circuit = new Part("Find the circuit", "which edges carry the difference between this text and the other one?", () => this.openCircuit());
    this.corrupted = element("input", { type: "text", dir: "auto", placeholder: "This text with something changed, and as many tokens" });
    const other = element("form", {}, [field("Another text", this.corrupted, "wide")]);
    other.addEventListener("submit", (event) => {
      event.preventDefault();
      this.openCircuit();
    });
    this.recovered = element("table", { class: "recovered", hidden: "" });
    const [find, ...found] = this.circuit.nodes;
    this.node = element("section", { class: "card inside", "aria-label": "Inside", hidden: "" }, [...this.inside.nodes, other, find, ...found.slice(0, 2), this.recovered, found[2]]);
  }

  // A new map: the inside must be requested again.
  offer(isThere) {
    this.inside.clear();
    this.circuit.clear();
    this.node.hidden = !isThere;
    this.recovered.hidden = true;
    this.inside.result.node.addEventListener("tensorlens:component", (event) => this.offerSwitch(event.detail));
  }

  // A new question goes before the work on the one before it.
  stop() {
    this.inside.stop();
    this.circuit.stop();
  }

  open() {
    const { result } = this.inside;
    this.asked = this.question();
    result.finish = ({ inside }) => {
      const isFocused = document.activeElement === this.inside.button;
      this.inside.button.hidden = true;
      new Inside(result.node, inside);
      if (isFocused) result.node.focus({ preventScroll: true }); // the button is gone
    };
    return this.inside.put("/api/inside", this.asked);
  }

  openCircuit() {
    const { result } = this.circuit;
    result.finish = ({ inside, curve, cpr, cmd, size }) => {
      const share = (x) => `${(100 * x).toFixed(1).replace(/^-0\.0$/, "0.0").replace("-", "−")} %`;
      const line = (tag, ...parts) => element("tr", {}, parts.map((one) => element(tag, {}, [one])));
      const caption = element("caption", { text: `The difference that the strongest of ${size} edges recover in the model, with all other edges as for the other text (CPR ${cpr.toFixed(2)}, CMD ${cmd.toFixed(2)})` });
      const bar = (f) => element("meter", { min: "0", max: "1", value: String(f), "aria-label": `${share(f)} recovered` });
      this.recovered.replaceChildren(caption, line("th", "edges", "", "recovered"), ...curve.map(([kept, f]) => line("td", share(kept), bar(f), share(f))));
      this.recovered.hidden = false;
      new Inside(result.node, inside);
    };
    return this.circuit.put("/api/circuit", { ...this.question(), corrupted: this.corrupted.value });
  }

  // A button below a component, and its result in words.
  offerAct([text, label], place, act) {
    const said = element("p", { class: "said", role: "status" });
    const request = (path, more) => {
      said.textContent = "Asking …";
      return ask(path, { ...this.asked, ...more }, { hear: ({ stage }) => stage && (said.textContent = `${visible(stage)} …`) });
    };
    const node = button(text, `${text}: ${label}`, async () => {
      node.disabled = true;
      try {
        said.textContent = (await act(request)) ?? "";
      } catch (error) {
        said.textContent = visible(error.message);
      } finally {
        node.disabled = false;
      }
    });
    place.append(node, said);
  }

  offerSwitch({ name, about, look, again }) {
    if (look && !look.why) {
      const [block, head] = name.match(/\d+/g).map(Number);
      this.offerAct(["Why did it look there?", `the pairs that made the score of ${name}`], about.querySelector(".look"), async (request) => {
        ({ why: look.why } = await request("/api/why", { block, head, query: look.query, key: look.key }));
        again();
      });
    }
    this.offerAct(["Switch it off", `run the model without ${name}`], about, async (request) => {
      const { ablation } = await request("/api/ablate", { component: name });
      return this.sentence(ablation);
    });
  }

  sentence({ target, value, predicted, true: truth, before, after }) {
    const first = ([one]) => `“${visible(one.name)}” (${percent(one.probability)})`;
    const numbers = `${visible(target)}: ${formatNumber(value, false)} before; T predicts ${formatNumber(predicted, false)}, the model gives ${formatNumber(truth, false)}.`;
    return `${numbers} The model said ${first(before)}; without it, it says ${first(after)}.`;
  }
}
