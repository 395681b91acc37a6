// Which rule set to ask: the recommendation for "which word decided", and the way back to the paper's.

const { element, button } = window.TensorLens;
const RECOMMENDED = ["half_gate", "attn_lrp"];
const METHOD = "tensor.in_class";

export class Advice {
  constructor({ turn, beside }) {
    Object.assign(this, { turn, beside });
    this.node = element("div", { class: "card advice", role: "note", "aria-label": "Recommendation", hidden: "" });
  }

  // `recommended` is the rule set that the server recommends, or null.
  offer(recommended, view) {
    const isFollowed = view.method === METHOD && !view.every && RECOMMENDED.includes(view.rules);
    this.node.hidden = !recommended && !isFollowed;
    if (this.node.hidden) return;
    const [text, other, title] = recommended
      ? [`Which word decided? In benchmarks with known answers, the rules ${recommended} ranked the deciding word higher.`, recommended, "Show it"]
      : [`These are the rules ${view.rules}, recommended for asking which word decided.`, "paper", "Show the paper’s"];
    const turn = button(title, `${title}: the same question under the rules ${other}`, () => this.turn(other));
    const beside = button("Side by side", `Side by side: the same question under the rules ${other} in a second map`, () => this.beside(other));
    this.node.replaceChildren(element("span", { text }), turn, beside);
  }
}
