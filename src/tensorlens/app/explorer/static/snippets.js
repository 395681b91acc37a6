// The view as something to paste: Python, or a command line. Both give the map that is shown.

const isReadable = (name) => !/[⟨⟩\ufffd]/.test(name);

// Double quotes and backslashes are escaped in Python as in JSON.
const literal = (text) => JSON.stringify(text);

// Single quotes may contain everything but themselves.
const shell = (text) => (/^[\w.:,/@%+-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", "'\\''")}'`);

// A piece of a character has no name that can be typed; its number serves.
const named = ({ index, name }) => (index === null || isReadable(name) ? name : index);

// Python and the command line begin with the paper's rules.
const isOther = (rules) => Boolean(rules) && rules !== "paper";

// Heads are counted from the first block of the range.
function headsInRange(view) {
  const start = view.blocks?.[0] ?? 0;
  return Object.entries(view.heads).map(([block, heads]) => [block - start, heads]);
}

export function asPython(view) {
  const lines = ["import tensorlens as tl", "", `lens = tl.load(${literal(view.model)}${isOther(view.rules) ? `, rules=${literal(view.rules)}` : ""})`, `T = lens(${literal(view.image ? "picture.png" : view.text)})`];
  if (view.blocks) lines.push(`T = T.blocks(${view.blocks.join(", ")})`);
  const heads = headsInRange(view).map(([block, list]) => `${block}: [${list.join(", ")}]`);
  if (heads.length) lines.push(`T = T.without_heads({${heads.join(", ")}})`);
  const options = [literal(view.method)];
  if (!view.every && view.output !== null) options.push(`out_token=${view.output}`);
  const picks = [view.target, view.against].filter((pick) => pick !== null).map((pick) => (typeof named(pick) === "string" ? literal(named(pick)) : named(pick)));
  if (picks.length) options.push(`target=${picks.length === 2 ? `(${picks.join(", ")})` : picks[0]}`);
  return [...lines, `T.map(${options.join(", ")})`, ""].join("\n");
}

export function asCommand(view) {
  const options = ["--method", view.method];
  if (isOther(view.rules)) options.push("--rules", view.rules);
  if (!view.every && view.output !== null) options.push("--out-token", String(view.output));
  if (view.target) options.push("--target", String(named(view.target)));
  if (view.against) options.push("--against", String(named(view.against)));
  if (view.blocks) options.push("--blocks", view.blocks.join(":"));
  for (const [block, heads] of headsInRange(view)) options.push("--without-heads", `${block}:${heads.join(",")}`);
  const input = view.image ? "picture.png" : view.text;
  const words = ["tensorlens", "map", ...options, "--", view.model, input];
  return words.map(shell).join(" ").replace(" '--' ", " -- ");
}
