// Token text made safe to display, as in labels.py, and numbers as people read them.

const NAMED = { "\n": "⏎", "\r": "␍", "\t": "⇥" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
const STRONG = /[\p{L}]/u;

function visible(token) {
  if (token === "") return "∅";
  if (/^ +$/.test(token)) return "␣".repeat(token.length);
  const shown = token.replace(HIDDEN, (character) => {
    if (character in NAMED) return NAMED[character];
    if (character === "\u200c" || character === "\u200d") return character;
    const code = character.codePointAt(0);
    if (code < 0x100) return "\\x" + code.toString(16).padStart(2, "0");
    return code < 0x10000
      ? "\\u" + code.toString(16).padStart(4, "0")
      : "\\U" + code.toString(16).padStart(8, "0");
  });
  // A combining mark alone would attach itself to the character before it.
  return /^\p{M}/u.test(token) ? "◌" + shown : shown;
}

function shorten(text, width) {
  const characters = Array.from(text.slice(0, 4 * width));
  if (characters.length <= width && text.length <= 4 * width) return text;
  return characters.slice(0, width - 1).join("") + "…";
}

// First strong character decides, as in the Unicode algorithm; tokens are isolated, so the browser cannot tell.
function directionOf(tokens) {
  for (const token of tokens) {
    const letter = token.match(STRONG);
    if (letter) return RIGHT_TO_LEFT.test(letter[0]) ? "rtl" : "ltr";
  }
  return "ltr";
}

// Three digits of the number itself, or as many decimals as show three digits of `like`, for numbers in one column.
function formatNumber(value, isSigned, like = value) {
  if (Number.isNaN(value)) return "no value";
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const magnitude = Math.floor(Math.log10(Math.abs(like)));
  const isPlain = magnitude >= -3 && magnitude <= 5;
  const digits = isPlain ? size.toFixed(Math.max(2 - magnitude, 0)) : size.toExponential(2);
  return (value < 0 ? "−" : isSigned ? "+" : "") + digits;
}

// Names and texts, one below the other.
function captionList(lines) {
  return element("dl", { class: "caption" }, lines.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })]));
}

// Text goes in as text: nothing in this component ever parses a string as markup.
function element(tag, attributes = {}, children = []) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
