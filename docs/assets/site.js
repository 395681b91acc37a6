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

// Long tables are folded, and a box filters their rows: one box for all the tables of a page.
const MANY_ROWS = 25;
const long = [...document.querySelectorAll(".md-content table")]
  .map((table) => ({ table, rows: [...table.querySelectorAll("tbody tr")] }))
  .filter(({ rows }) => rows.length >= MANY_ROWS);

for (const one of long) {
  one.folded = document.createElement("details");
  one.folded.className = "long-table";
  one.summary = one.folded.appendChild(document.createElement("summary"));
  const around = one.table.closest(".md-typeset__scrollwrap") ?? one.table;
  around.before(one.folded);
  one.folded.append(around);
}

function filterRows(words) {
  for (const { rows, folded, summary } of long) {
    let n = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      n += !row.hidden;
    }
    folded.open = words.length > 0 && n > 0;
    summary.textContent = `${n} of ${rows.length} rows`;
  }
}

if (long.length) {
  const box = document.createElement("input");
  box.className = "row-filter";
  box.type = "search";
  box.placeholder = "Filter the tables of this page";
  box.setAttribute("aria-label", "Filter the tables of this page");
  box.addEventListener("input", () => filterRows(box.value.toLowerCase().split(/\s+/).filter(Boolean)));
  document.querySelector(".md-content h1").after(box);
  filterRows([]);
}
