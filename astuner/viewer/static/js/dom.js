// Functions that create elements. Texts of a record become text nodes, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  setAll(element, attributes);
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAll(element, attributes);
  element.append(...children.flat());
  return element;
}

function setAll(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("aria-") && typeof value === "boolean") element.setAttribute(key, String(value));
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
}

// Control and format characters, unusual spaces, characters that fonts draw as nothing (such as the empty braille cell),
// and lone surrogates. Newlines and tabs are ordinary text.
const ODD = /(?![ \n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Zs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]/u;
const CLIP = 4000, MORE = 100_000;

// Name of a character that is invisible or changes the display of the following text.
export function characterName(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "⏎";
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

export const isInvisible = (character) => ODD.test(character);

// A text with control and bidirectional characters made visible. Long texts are collapsed.
export function textBox(text, limit = CLIP) {
  const full = asText(text);
  const box = h("div", { class: "said", dir: "auto" });
  const show = (length) => {
    box.replaceChildren(...pieces(full.slice(0, length)));
    if (full.length <= length) return;
    const more = h("button", { type: "button", onclick: () => show(length + MORE) }, `show more of ${count(full.length)} characters`);
    box.append("… ", more);
  };
  show(limit);
  return box;
}

function pieces(text) {
  // Adjacent characters of one kind share an element, as a text may have megabytes of them.
  const elements = [];
  let run = "", odd = false;
  for (const character of text) {
    if (ODD.test(character) !== odd) {
      elements.push(odd ? h("span", { class: "odd" }, run) : run);
      run = "";
      odd = !odd;
    }
    run += odd ? characterName(character) : character;
  }
  elements.push(odd ? h("span", { class: "odd" }, run) : run);
  return elements;
}

export function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
}

// A text shortened to one line.
export function brief(value, limit = 120) {
  const text = asText(value ?? "");
  const cut = text.length > limit ? `${text.slice(0, limit)}…` : text;
  return [...cut].map((character) => (ODD.test(character) || character === "\n" ? characterName(character) : character)).join("");
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => (number === null || number === undefined ? "–" : WHOLE.format(number));
export const share = (number) => (number === null || number === undefined ? "–" : `${(100 * number).toFixed(1)} %`);

export const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export function real(number, digits = 3) {
  if (typeof number !== "number") return "–";
  if (number !== 0 && (Math.abs(number) < 0.001 || Math.abs(number) >= 1e6)) return number.toExponential(2);
  return String(Number(number.toFixed(digits)));
}

// Range of the advantages of an agent's calls: one number, or the least and the greatest.
export const between = ({ least, most }) => (least === most ? real(least) : `${real(least)} … ${real(most)}`);

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function tile(name, value, title) {
  return h("div", { class: "card tile", title }, h("b", {}, value), h("span", {}, name));
}

// The keyboard can scroll a box that has the focus, so a box that scrolls can take it.
const scrollable = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

// columns: [heading, function from a row to a cell, whether the column is text]
export function list(columns, rows) {
  const kind = (column) => (column[2] ? "text" : undefined);
  const headings = columns.map((column) => h("th", { class: kind(column), scope: "col" }, column[0]));
  // On narrow screens, a row is a card, and each cell has its heading before it.
  const cell = (column, place, row) => h("td", { class: kind(column), "data-label": headings[place].textContent }, column[1](row));
  const body = rows.map((row) => h("tr", {}, columns.map((column, place) => cell(column, place, row))));
  const head = h("tr", {}, headings);
  const box = h("div", { class: "card scroll" }, h("table", { class: "list" }, h("thead", {}, head), h("tbody", {}, body)));
  scrollable.observe(box);
  return box;
}
