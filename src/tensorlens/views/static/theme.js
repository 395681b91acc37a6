// Light or dark: the reader's choice first, then the notebook's theme, then the system's.

const THEME_EVENT = "tensorlens:theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function shadeAround() {
  const { dataset } = document.documentElement;
  if (dataset.tensorlensTheme) return dataset.tensorlensTheme;
  const jupyter = document.body.dataset.jpThemeLight;
  if (jupyter) return jupyter === "false" ? "dark" : "light";
  const code = document.body.dataset.vscodeThemeKind;
  if (code) return code.includes("light") ? "light" : "dark";
  return dark.matches ? "dark" : "light";
}

function chooseShade(shade) {
  document.documentElement.dataset.tensorlensTheme = shade;
  document.dispatchEvent(new Event(THEME_EVENT));
}

function onShadeChange(act) {
  document.addEventListener(THEME_EVENT, act);
  dark.addEventListener("change", act);
  new MutationObserver(act).observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
}
