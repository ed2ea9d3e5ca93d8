// Answers of episodes and excerpts of their texts, in lists.

import { fetchJson } from "./address.js";
import { brief, h, textBox } from "./dom.js";
import { snapshot } from "./snapshot.js";

const SHORT = 100;

// The beginning and the end of an answer; a click shows all of it. Null if the answer is not known yet.
export function answerCell(run, row) {
  if (row.answer === null || row.answer === undefined) return h("span", { class: "soft", title: "not read yet" }, "–");
  if (row.answer === "") return h("span", { class: "soft" }, "no text");
  const box = h("div", { class: "answer" });
  const fold = () => box.replaceChildren(
    h("button", { type: "button", class: "plain", name: `answer ${row.key}`, title: brief(row.answer, 400), "aria-expanded": "false", onclick: open }, shorten(row.answer)));
  const open = async () => {
    let content;
    try {
      content = textBox(snapshot ? row.answer : (await fetchJson("answer", { run, episode: row.key })).answer);
    } catch (error) {
      content = h("p", { class: "bad" }, error.message);
    }
    box.replaceChildren(h("button", { type: "button", class: "plain soft", name: `answer ${row.key}`, "aria-expanded": "true", onclick: fold }, "show less"), content);
    box.querySelector("button").focus();
  };
  fold();
  return box;
}

// The end of a long answer is its conclusion.
function shorten(text) {
  if (text.length <= SHORT + 20) return brief(text, SHORT + 20);
  return `${brief(text.slice(0, SHORT / 2))} … ${brief(text.slice(-SHORT / 2))}`;
}

// A part of a text in which the matches are marked.
export function excerptCell(excerpt) {
  if (!excerpt) return h("span", { class: "soft" }, "–");
  const parts = excerpt.parts.map(([text, matches]) => (matches ? h("mark", {}, brief(text, 400)) : brief(text.replace(/\s+/g, " "), 400)));
  return h("div", { class: "excerpt" }, h("span", { class: "soft" }, `${brief(excerpt.role, 20)}: `), parts);
}
