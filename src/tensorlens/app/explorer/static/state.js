// The view of a panel as a small record, and as text in the address: everything after the #, which no server sees.

export const FRESH = {
  model: null,
  text: "",
  image: null,
  saved: null,
  rules: null, // null: the rule set that the explorer was started with
  method: null, // the server's choice, until someone chooses
  every: true,
  output: null,
  target: null,
  against: null,
  blocks: null,
  heads: {},
};

const PICKS = ["target", "against"];

function write(view) {
  const parts = new URLSearchParams();
  for (const name of ["model", view.image ? "image" : "text", "method", "rules"]) if (view[name]) parts.set(name, view[name]);
  if (view.saved !== null) parts.set("saved", view.saved);
  if (view.output !== null) parts.set("output", view.output);
  if (!view.every) parts.set("only", "1");
  for (const name of PICKS) if (view[name]) parts.set(name, JSON.stringify([view[name].index, view[name].name]));
  if (view.blocks) parts.set("blocks", view.blocks.join(":"));
  if (Object.keys(view.heads).length) parts.set("without", JSON.stringify(view.heads));
  return parts.toString();
}

// A link may come from anyone: each part is taken only if it has the right form.
function read(text) {
  const parts = new URLSearchParams(text);
  const view = structuredClone(FRESH);
  for (const name of ["model", "text", "image", "method", "rules"]) if (parts.get(name)) view[name] = parts.get(name);
  view.saved = whole(parts.get("saved"));
  view.output = whole(parts.get("output"));
  view.every = parts.get("only") !== "1";
  for (const name of PICKS) view[name] = pick(parse(parts.get(name)));
  const blocks = (parts.get("blocks") ?? "").split(":").map(whole);
  if (blocks.length === 2 && !blocks.includes(null)) view.blocks = blocks;
  view.heads = heads(parse(parts.get("without")));
  return view;
}

function whole(text) {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function pick(pair) {
  const isPick = Array.isArray(pair) && (Number.isInteger(pair[0]) || pair[0] === null) && typeof pair[1] === "string";
  return isPick ? { index: pair[0], name: pair[1] } : null;
}

function heads(found) {
  if (found === null || typeof found !== "object") return {};
  const isList = (list) => Array.isArray(list) && list.length && list.every(Number.isInteger);
  return Object.fromEntries(Object.entries(found).filter(([block, list]) => /^\d+$/.test(block) && isList(list)));
}

const BETWEEN = "&and&"; // no part of a view: its own ampersands are escaped

export function toFragment(views) {
  return "#" + views.map(write).join(BETWEEN);
}

export function fromFragment(fragment) {
  const parts = fragment.replace(/^#/, "").split(BETWEEN).filter((part) => part.includes("="));
  return parts.slice(0, 2).map(read);
}

const LARGEST = 512;

// The link of a page with one form: its fields by name, each taken only if it has the form of what it begins as.
export class FormLink {
  // `text` is the required field, `choices` has the values of the fields that have a list.
  constructor(page, text, fresh, choices = {}) {
    Object.assign(this, { page, text, fresh, choices });
  }

  isOf(fragment) {
    return new URLSearchParams(fragment.replace(/^#/, "")).get("page") === this.page;
  }

  read(fragment) {
    const parts = new URLSearchParams(fragment.replace(/^#/, ""));
    const view = { ...this.fresh, isLinked: parts.has(this.text) };
    for (const [name, first] of Object.entries(this.fresh)) {
      const text = parts.get(name);
      if (!text) continue;
      if (typeof first === "boolean") view[name] = text === "1";
      else if (typeof first === "number") view[name] = Math.min(Math.max(whole(text) ?? first, 1), LARGEST);
      else if (this.choices[name]?.includes(text) ?? true) view[name] = text;
    }
    return view;
  }

  write(view) {
    const parts = new URLSearchParams({ page: this.page });
    for (const name of Object.keys(this.fresh)) if (view[name]) parts.set(name, view[name] === true ? "1" : view[name]);
    return `#${parts}`;
  }
}

// The question to the server.
export function question(view) {
  const value = (chosen) => (chosen === null ? null : (chosen.index ?? chosen.name));
  return {
    model: view.model,
    ...(view.image ? { image: view.image } : { text: view.text }),
    rules: view.rules,
    method: view.method,
    out_token: view.every ? null : view.output,
    is_one: !view.every,
    at: view.output,
    target: value(view.target),
    against: value(view.against),
    blocks: view.blocks,
    heads: Object.keys(view.heads).length ? view.heads : null,
  };
}
