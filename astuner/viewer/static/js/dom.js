// Builds elements. Text from a record goes in as text nodes only, never as markup.

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
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
}

const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/u;
const CLIP = 4000;

// What cannot be seen, or changes how what follows is seen, by name.
export function named(character) {
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

export const isOdd = (character) => ODD.test(character);

// A text with control and bidirectional characters shown as what they are; long ones fold.
export function said(text, limit = CLIP) {
  const full = asText(text);
  const box = h("div", { class: "said", dir: "auto" });
  box.append(...pieces(full.slice(0, limit)));
  if (full.length > limit) {
    const more = h("button", { type: "button", onclick: () => box.replaceChildren(...pieces(full)) },
      `show all ${count(full.length)} characters`);
    box.append("… ", more);
  }
  return box;
}

function pieces(text) {
  const found = [];
  let plain = "";
  for (const character of text) {
    if (!ODD.test(character)) { plain += character; continue; }
    found.push(plain, h("span", { class: "odd" }, named(character)));
    plain = "";
  }
  found.push(plain);
  return found;
}

export function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
}

// A text for one line of a list.
export function brief(value, limit = 120) {
  const text = asText(value ?? "");
  const cut = text.length > limit ? `${text.slice(0, limit)}…` : text;
  return [...cut].map((character) => (ODD.test(character) || character === "\n" ? named(character) : character)).join("");
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => (number === null || number === undefined ? "–" : WHOLE.format(number));
export const share = (number) => (number === null || number === undefined ? "–" : `${(100 * number).toFixed(1)} %`);

export const many = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export function real(number, digits = 3) {
  if (typeof number !== "number") return "–";
  if (number !== 0 && (Math.abs(number) < 0.001 || Math.abs(number) >= 1e6)) return number.toExponential(2);
  return String(Number(number.toFixed(digits)));
}

// The advantages of an agent's calls: one number, or from the least to the most.
export const between = ({ least, most }) => (least === most ? real(least) : `${real(least)} … ${real(most)}`);

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function tile(name, value, title) {
  return h("div", { class: "card tile", title }, h("b", {}, value), h("span", {}, name));
}

// columns: [heading, cell of a row, whether it is text]
export function list(columns, rows) {
  const kind = (column) => (column[2] ? "text" : undefined);
  const head = h("tr", {}, columns.map((column) => h("th", { class: kind(column), scope: "col" }, column[0])));
  const body = rows.map((row) => h("tr", {}, columns.map((column) => h("td", { class: kind(column) }, column[1](row)))));
  return h("div", { class: "card scroll" }, h("table", { class: "list" }, h("thead", {}, head), h("tbody", {}, body)));
}
