// The page: the panels, the tools above them, and the link that restores everything.

import { ANSWER_LINK, AnswerPanel } from "./answer.js";
import { getJson } from "./api.js";
import { choice } from "./controls.js";
import { EXAMPLES, Panel } from "./panel.js";
import { SIMILAR_LINK, SimilarPanel } from "./similar.js";
import { FRESH, fromFragment, toFragment } from "./state.js";

const { element, button, mount, visible, shadeAround, chooseShade, onShadeChange } = window.TensorLens;
const KEPT_SHADE = "tensorlens-shade";

class Explorer {
  constructor(catalogue) {
    this.catalogue = catalogue;
    this.place = document.querySelector(".panels");
    this.panels = [];
    this.buildTools();
    this.restore();
    window.addEventListener("hashchange", () => {
      if (location.hash !== this.written) this.restore();
    });
  }

  buildTools() {
    const tools = document.querySelector(".tools");
    const { maps, reports } = this.catalogue;
    if (maps.length + reports.length) tools.append(this.buildOpener());
    this.compare = button("Compare", "Compare: show a second map beside this one, or one map again", () => this.toggleCompare());
    this.shade = button("", "Switch between light and dark", () => this.switchShade());
    tools.append(this.compare, button("Copy link", "Copy link to this view", () => this.copyLink()), this.shade);
    onShadeChange(() => this.showShade());
    this.showShade();
  }

  buildOpener() {
    const { maps, reports } = this.catalogue;
    const options = [{ name: "", title: "Open…" }];
    maps.forEach((title, k) => options.push({ name: `map ${k}`, title: `Map: ${title}` }));
    reports.forEach((title, k) => options.push({ name: `report ${k}`, title: `Report: ${title}` }));
    const opener = choice("Open a saved map or report", options, (value) => {
      const [kind, number] = value.split(" ");
      opener.show("");
      if (kind === "report") window.open(`/reports/${number}`, "_blank", "noopener");
      else if (kind === "map") this.openSaved(Number(number));
    });
    return opener.node;
  }

  openSaved(number) {
    if (this.answer) {
      location.hash = `saved=${number}`;
      return;
    }
    const last = this.panels.at(-1);
    const view = { ...structuredClone(FRESH), model: this.catalogue.models[0]?.name ?? null, saved: number };
    const panel = this.makePanel(view);
    last.node.replaceWith(panel.node);
    last.stop();
    this.panels[this.panels.length - 1] = panel;
    this.start(panel);
  }

  makePanel(view) {
    return new Panel(this.catalogue, view, { onChange: () => this.write(), onSelect: (panel, output) => this.follow(panel, output), onCopy: (text) => this.copy(text, "Copied."), onMap: () => this.compared() });
  }

  async start(panel) {
    const { view } = panel;
    const title = view.saved === null ? undefined : this.catalogue.maps[view.saved];
    if (title !== undefined) {
      try {
        panel.showSaved(await getJson(`/api/saved/${view.saved}`), title);
      } catch (error) {
        panel.fail(error);
      }
      this.write();
    } else if (view.missing) panel.offerOther(view.missing);
    else if (view.image || (view.text && view.isLinked)) await panel.run();
    else if (view.text && view.model) await panel.greet();
  }

  // Three pages: maps of a text, answers, and two texts that are similar.
  showPage() {
    const page = this.answer === null ? "map" : this.answer instanceof SimilarPanel ? "similar" : "answer";
    document.querySelectorAll(".pages a").forEach((link) => {
      if (link.dataset.page === page) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    this.compare.hidden = this.answer !== null;
  }

  restoreAnswer() {
    const isSimilar = SIMILAR_LINK.isOf(location.hash);
    const view = (isSimilar ? SIMILAR_LINK : ANSWER_LINK).read(location.hash);
    const hooks = { onChange: () => this.write(), onCopy: (text) => this.copy(text, "Copied.") };
    this.answer = isSimilar ? new SimilarPanel(this.catalogue, view, hooks) : new AnswerPanel(this.catalogue, view, hooks);
    this.place.replaceChildren(this.answer.node);
    this.place.classList.remove("two");
    this.showPage();
    if (view.isLinked) this.answer.run();
  }

  // The panels of the link, or a fresh one with an example.
  restore() {
    this.written = location.hash;
    this.answer?.stop();
    this.answer = null;
    if (ANSWER_LINK.isOf(location.hash) || SIMILAR_LINK.isOf(location.hash)) {
      this.panels.forEach((panel) => panel.stop());
      this.panels = [];
      this.restoreAnswer();
      return;
    }
    this.showPage();
    const linked = fromFragment(location.hash);
    const { models, methods, rules, maps } = this.catalogue;
    const isThere = (view) => models.some(({ name }) => name === view.model);
    const known = (view) => ({
      ...view,
      missing: view.model !== null && view.saved === null && !isThere(view) ? view.model : null,
      model: isThere(view) ? view.model : (models[0]?.name ?? null),
      method: methods.some(({ name }) => name === view.method) ? view.method : FRESH.method,
      rules: rules.includes(view.rules) ? view.rules : null,
      isLinked: true,
    });
    const fresh = { ...structuredClone(FRESH), model: models[0]?.name ?? null, text: EXAMPLES[0], saved: models.length || !maps.length ? null : 0 };
    const views = linked.length ? linked.map(known) : [fresh];
    this.panels.forEach((panel) => panel.stop());
    this.panels = views.map((view) => this.makePanel(view));
    this.arrange();
    this.panels.forEach((panel) => this.start(panel));
  }

  arrange() {
    this.place.replaceChildren(...this.panels.map((panel) => panel.node));
    this.place.classList.toggle("two", this.panels.length === 2);
    this.compare.textContent = this.panels.length === 2 ? "One map" : "Compare";
  }

  async toggleCompare() {
    if (this.panels.length === 2) {
      this.panels.pop().stop();
      this.arrange();
      this.compared();
      this.write();
      return;
    }
    await this.openSecond();
  }

  async openSecond() {
    const view = { ...structuredClone(this.panels[0].view), isLinked: true };
    const second = this.makePanel(view);
    second.folded.open = this.panels[0].folded.open;
    this.panels.push(second);
    this.arrange();
    if (this.panels[0].result.data) await this.start(second);
    this.write();
  }

  // Two maps of the same tokens share one scale, and their difference is below them.
  compared() {
    const [first, second] = this.panels.map((panel) => panel.result);
    this.difference?.remove();
    this.difference = null;
    for (const one of [first, second]) if (one?.data) one.rescale(0);
    if (!second?.data || !first.data || first.node.hidden || second.node.hidden) return;
    const same = (a, b) => (a ?? []).join("\u0000") === (b ?? []).join("\u0000");
    if (first.lens.nOut !== second.lens.nOut || !same(first.lens.data.inTokens, second.lens.data.inTokens)) return;
    const most = Math.max(first.scale, second.scale);
    for (const one of [first, second]) one.rescale(most);
    const host = element("div", { class: "host embedded" });
    this.difference = element("section", { class: "card result difference", "aria-label": "Difference" }, [host]);
    this.place.append(this.difference);
    const { lens } = first;
    const values = Float32Array.from({ length: lens.nOut * lens.nIn }, (_, k) => lens.scores.at(Math.floor(k / lens.nIn), k % lens.nIn) - second.lens.scores.at(Math.floor(k / lens.nIn), k % lens.nIn));
    const title = "Difference: the first map minus the second";
    mount(host, { ...lens.data, title, scores: { values, unit: 1 }, isSigned: true, sums: [], sink: [], caption: [], rowCaption: [], words: [], answer: null });
    host.tensorlens.scores.endAt(most);
    host.tensorlens.paint();
  }

  // The same output is chosen on both sides, where both have it.
  follow(panel, output) {
    for (const other of this.panels) {
      if (other === panel || !other.result.data) continue;
      other.result.choose(output);
      other.view.output = other.result.output;
      other.result.showBias();
    }
  }

  write() {
    if (location.hash !== this.written) return; // a link was followed just now, and its page is about to be shown
    const single = this.answer instanceof SimilarPanel ? SIMILAR_LINK : ANSWER_LINK;
    history.replaceState(null, "", this.answer ? single.write(this.answer.view) : toFragment(this.panels.map(({ view }) => view)));
    this.written = location.hash;
  }

  async copyLink() {
    this.write();
    await this.copy(location.href, "Link copied. It works while this explorer runs.");
  }

  async copy(text, message) {
    try {
      await navigator.clipboard.writeText(text);
      this.toast(message);
    } catch {
      this.toast("The browser does not allow copying.");
    }
  }

  toast(text) {
    const node = document.querySelector(".toast");
    node.textContent = text;
    node.classList.add("shown");
    clearTimeout(this.hiding);
    this.hiding = setTimeout(() => node.classList.remove("shown"), 2600);
  }

  switchShade() {
    const shade = shadeAround() === "dark" ? "light" : "dark";
    localStorage.setItem(KEPT_SHADE, shade);
    chooseShade(shade);
  }

  showShade() {
    const shade = shadeAround();
    document.documentElement.dataset.shade = shade;
    this.shade.textContent = shade === "dark" ? "Light" : "Dark";
  }
}

async function begin() {
  const kept = localStorage.getItem(KEPT_SHADE);
  if (kept === "dark" || kept === "light") chooseShade(kept);
  try {
    window.explorer = new Explorer(await getJson("/api/start"));
  } catch (error) {
    document.querySelector(".panels").append(element("div", { class: "card error", role: "alert", text: visible(error.message) }));
  }
}

begin();
