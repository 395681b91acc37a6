// From a map to where in the model: heads, flow and graph of the same question, and the model without one of them.

import { ask } from "./api.js";
import { percent } from "./controls.js";

const { element, button, visible, formatNumber, Inside } = window.TensorLens;

export class InsidePanel {
  constructor({ question, say, rest }) {
    Object.assign(this, { question, say, rest });
    this.opener = button("Look inside", "Look inside: heads, feed-forwards, the flow over depth, and the graph of this target", () => this.open());
    this.told = element("span", { class: "stage", role: "status" });
    this.problem = element("p", { class: "problem", role: "alert", hidden: "" });
    this.host = element("div", { class: "inside-host embedded" });
    this.node = element("section", { class: "card inside", "aria-label": "Inside", hidden: "" }, [this.opener, this.told, this.problem, this.host]);
    this.host.addEventListener("tensorlens:component", (event) => this.offerSwitch(event.detail));
  }

  // A new map: what is inside has to be asked for anew.
  offer(isThere) {
    this.asked = null;
    this.told.textContent = "";
    this.node.hidden = !isThere;
    this.opener.hidden = false;
    this.problem.hidden = true;
    this.host.replaceWith((this.host = this.host.cloneNode(false)));
    this.host.addEventListener("tensorlens:component", (event) => this.offerSwitch(event.detail));
  }

  async open() {
    const mine = (this.asked = this.question());
    this.problem.hidden = true;
    try {
      const hear = (event) => {
        if (event.type === "progress" && this.asked === mine) this.told.textContent = `${visible(event.stage)} …`;
        this.say(event);
      };
      this.told.textContent = "Asking …";
      const { inside } = await ask("/api/inside", mine, { hear });
      if (this.asked !== mine) return; // it is of the map before
      this.opener.hidden = true;
      new Inside(this.host, inside);
    } catch (error) {
      if (this.asked === mine) this.fail(error);
    } finally {
      if (this.asked === mine) this.told.textContent = "";
      this.rest();
    }
  }

  offerSwitch({ name, about, look, again }) {
    if (look && !look.why) this.offerWhy(about, look, name, again);
    const said = element("p", { class: "said", role: "status" });
    const act = button("Switch it off", `Switch it off: run the model without ${name}`, async () => {
      act.disabled = true;
      try {
        const { ablation } = await ask("/api/ablate", { ...this.asked, component: name }, { hear: this.say });
        said.textContent = this.sentence(ablation);
      } catch (error) {
        said.textContent = visible(error.message);
      } finally {
        act.disabled = false;
        this.rest();
      }
    });
    about.append(act, said);
  }

  offerWhy(about, look, name, again) {
    const [block, head] = name.match(/\d+/g).map(Number);
    const said = element("p", { class: "said", role: "status" });
    const act = button("Why did it look there?", `Why did ${name} look there: the pairs that made its score`, async () => {
      act.disabled = true;
      try {
        const { why } = await ask("/api/why", { ...this.asked, block, head, query: look.query, key: look.key }, { hear: this.say });
        look.why = why;
        again();
      } catch (error) {
        said.textContent = visible(error.message);
        act.disabled = false;
      } finally {
        this.rest();
      }
    });
    about.querySelector(".look").append(act, said);
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
