// Light or dark: the reader's choice first, then the notebook's, then the system's.

const SHADE_EVENT = "tensorlens:shade";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function shadeAround() {
  const { dataset } = document.documentElement;
  if (dataset.tensorlensShade) return dataset.tensorlensShade;
  const jupyter = document.body.dataset.jpThemeLight;
  if (jupyter) return jupyter === "false" ? "dark" : "light";
  const code = document.body.dataset.vscodeThemeKind;
  if (code) return code.includes("light") ? "light" : "dark";
  return dark.matches ? "dark" : "light";
}

function chooseShade(shade) {
  document.documentElement.dataset.tensorlensShade = shade;
  document.dispatchEvent(new Event(SHADE_EVENT));
}

function shadeButton() {
  return Object.assign(button("", "Switch between light and dark", () => chooseShade(shadeAround() === "dark" ? "light" : "dark")), { className: "shade" });
}

// Until `signal` aborts: a page that shows one map after the other would keep them all alive.
function onShadeChange(act, signal) {
  document.addEventListener(SHADE_EVENT, act, { signal });
  dark.addEventListener("change", act, { signal });
  const observer = new MutationObserver(act);
  signal?.addEventListener("abort", () => observer.disconnect());
  observer.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
}
