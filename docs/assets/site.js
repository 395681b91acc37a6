// Mathematics from the copy of KaTeX in this site; maps take the shade of the page around them.

for (const place of document.querySelectorAll(".arithmatex")) {
  const source = place.textContent.trim();
  const displayMode = source.startsWith("\\[");
  katex.render(source.slice(2, -2), place, { displayMode, throwOnError: false });
}

function followShade() {
  const shade = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  document.documentElement.dataset.tensorlensShade = shade;
  document.dispatchEvent(new Event("tensorlens:shade"));
}

followShade();
new MutationObserver(followShade).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
