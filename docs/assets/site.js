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

// Long tables are folded. On their pages a box filters the rows of all tables, and hides the text between them.
const MANY_ROWS = 25;
const content = document.querySelector(".md-content__inner");
const tables = [...content.querySelectorAll("table:not(details *)")].map((table) => ({
  rows: [...table.querySelectorAll("tbody tr")],
  around: table.closest(".md-typeset__scrollwrap") ?? table,
}));
const long = tables.filter(({ rows }) => rows.length >= MANY_ROWS);

for (const one of long) {
  one.folded = document.createElement("details");
  one.folded.className = "long-table";
  one.summary = one.folded.appendChild(document.createElement("summary"));
  one.around.before(one.folded);
  one.folded.append(one.around);
}

function filterRows(words) {
  content.classList.toggle("filtering", words.length > 0);
  for (const { rows, around, folded, summary } of tables) {
    let n = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      n += !row.hidden;
    }
    (folded ?? around).hidden = n === 0;
    if (folded) {
      folded.open = words.length > 0;
      summary.textContent = `${n} of ${rows.length} rows`;
    }
  }
}

if (long.length) {
  const box = document.createElement("input");
  box.className = "row-filter";
  box.type = "search";
  box.placeholder = "Filter the tables of this page";
  box.setAttribute("aria-label", "Filter the tables of this page");
  box.addEventListener("input", () => filterRows(box.value.toLowerCase().split(/\s+/).filter(Boolean)));
  content.querySelector("h1").after(box);
  filterRows([]);
}
