// From a map to where in the model: heads, flow and graph of the same question, and the model without one of them.

import { ask } from "./api.js";
import { field, percent } from "./controls.js";

const { element, button, visible, formatNumber, Inside } = window.TensorLens;

export class InsidePanel {
  constructor(question) {
    this.question = question;
    this.opener = button("Look inside", "Look inside: heads, feed-forwards, the flow over depth, and the graph of this target", () => this.open());
    this.told = element("span", { class: "stage", role: "status" });
    this.problem = element("p", { class: "problem", role: "alert", hidden: "" });
    this.host = element("div");
    this.corrupted = element("input", { type: "text", dir: "auto", placeholder: "This text with something changed, and as many tokens" });
    const compare = button("Find the circuit", "Find the circuit: which edges carry the difference between this text and the other one?", () => this.openCircuit());
    const other = element("form", { class: "compared" }, [field("Another text", this.corrupted, "wide"), compare]);
    other.addEventListener("submit", (event) => event.preventDefault());
    this.recovered = element("table", { class: "recovered", hidden: "" });
    this.circuit = element("div");
    this.node = element("section", { class: "card inside", "aria-label": "Inside", hidden: "" }, [this.opener, this.told, this.problem, this.host, other, this.recovered, this.circuit]);
  }

  // A new map: the inside must be requested again.
  offer(isThere) {
    this.asked = null;
    this.told.textContent = "";
    this.node.hidden = !isThere;
    this.opener.hidden = false;
    this.problem.hidden = this.recovered.hidden = true;
    for (const part of ["host", "circuit"]) this[part].replaceWith((this[part] = element("div", { class: "inside-host embedded" })));
    this.host.addEventListener("tensorlens:component", (event) => this.offerSwitch(event.detail));
  }

  // Progress is shown beside the button that started the work.
  request(path, question, told) {
    told.textContent = "Asking …";
    return ask(path, question, { hear: ({ type, stage }) => type === "progress" && (told.textContent = `${visible(stage)} …`) });
  }

  open() {
    return this.put("/api/inside", {}, ({ inside }) => {
      this.opener.hidden = true;
      new Inside(this.host, inside);
    });
  }

  openCircuit() {
    return this.put("/api/circuit", { corrupted: this.corrupted.value }, ({ inside, curve, cpr, cmd, size }) => {
      const share = (x) => `${(100 * x).toFixed(1)} %`;
      const line = ([kept, f]) => element("tr", {}, [share(kept), element("meter", { min: "0", max: "1", value: String(f) }), share(f)].map((one) => element("td", {}, [one])));
      const caption = `Part of the difference that the best of ${size} edges recover in the model, with all other edges as for the other text: CPR ${cpr.toFixed(2)}, CMD ${cmd.toFixed(2)}`;
      this.recovered.replaceChildren(element("caption", { text: caption }), ...curve.map(line));
      this.recovered.hidden = false;
      new Inside(this.circuit, inside);
    });
  }

  async put(path, more, show) {
    const mine = (this.asked = this.question());
    this.problem.hidden = true;
    try {
      const found = await this.request(path, { ...mine, ...more }, this.told);
      if (this.asked === mine) show(found); // otherwise it is of the map before
    } catch (error) {
      if (this.asked === mine) this.fail(error);
    } finally {
      if (this.asked === mine) this.told.textContent = "";
    }
  }

  // A button below a component, and its result in words.
  offerAct([text, label], place, act) {
    const said = element("p", { class: "said", role: "status" });
    const node = button(text, `${text}: ${label}`, async () => {
      node.disabled = true;
      try {
        said.textContent = (await act(said)) ?? "";
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
      this.offerAct(["Why did it look there?", `the pairs that made the score of ${name}`], about.querySelector(".look"), async (told) => {
        ({ why: look.why } = await this.request("/api/why", { ...this.asked, block, head, query: look.query, key: look.key }, told));
        again();
      });
    }
    this.offerAct(["Switch it off", `run the model without ${name}`], about, async (told) => {
      const { ablation } = await this.request("/api/ablate", { ...this.asked, component: name }, told);
      return this.sentence(ablation);
    });
  }

  sentence({ target, value, predicted, true: truth, before, after }) {
    const first = ([one]) => `“${visible(one.name)}” (${percent(one.probability)})`;
    const numbers = `${visible(target)}: ${formatNumber(value, false)} before; T predicts ${formatNumber(predicted, false)}, the model gives ${formatNumber(truth, false)}.`;
    return `${numbers} The model said ${first(before)}; without it, it says ${first(after)}.`;
  }

  fail(error) {
    this.problem.textContent = visible(error.message);
    this.problem.hidden = false;
  }
}
