// Two episodes side by side, with the words that differ coloured.

import { fetchJson, link } from "./address.js";
import { speaker } from "./chat.js";
import { brief, characterName, count, facts, h, isInvisible, list, real, share, textBox } from "./dom.js";
import { copyButton, sidePicker } from "./toolbar.js";

const LIMIT = 400;

export async function comparePage(query) {
  const asked = { run: query.get("run"), episode: query.get("episode"), with: query.get("with"), with_run: query.get("with_run") };
  const [found, runs] = await Promise.all([fetchJson("compare", asked), fetchJson("runs")]);
  const names = runs.map((run) => run.name);
  const { left, right } = found;
  const swapped = link("compare", address(right, left));
  const go = (place) => (run, key) => {
    const side = { run, row: { key } };
    location.hash = link("compare", place === 0 ? address(side, right) : address(left, side));
  };
  const picker = (side, place) => sidePicker(side, names, go(place));
  return { content: [h("nav", { class: "bar tools", "aria-label": "Comparison" }, h("a", { href: link("task", { run: left.run, task: left.row.task_key }) }, "task over the steps"),
    h("a", { href: swapped }, "swap sides"), copyButton()),
    h("h1", {}, `Comparison: ${brief(left.row.query || left.row.task, 100)}`),
    left.row.task_key === right.row.task_key ? null : h("p", { class: "card note" }, "The episodes are of different tasks."),
    h("div", { class: "both" }, sideCard(left, picker(left, 0), "before"), sideCard(right, picker(right, 1), "after")),
    h("div", { class: "legend" }, h("span", {}, h("i", { class: "removed" }), "only in the left episode"), h("span", {}, h("i", { class: "added" }), "only in the right episode")),
    conversation(found), h("details", { class: "figures" }, h("summary", {}, "Figures"), figuresTable(left, right))].filter(Boolean) };
}

const address = (left, right) => ({ run: left.run, episode: left.row.key, with: right.row.key, with_run: right.run === left.run ? null : right.run });

function sideCard(side, picker, name) {
  const { row, episode, verdict } = side;
  const shade = row.status !== "ok" ? "bad" : row.is_success ? "good" : "warn";
  const components = Object.entries(episode.judgement?.components ?? {}).map(([key, value]) => `${brief(key, 30)} ${real(value)}`);
  return h("section", { class: "card", "data-side": name }, picker,
    h("h2", {}, h("a", { href: link("episode", { run: side.run, episode: row.key }) }, brief(row.episode, 80))),
    h("p", {}, h("b", { class: shade }, row.status === "ok" ? `reward ${real(row.reward)}` : brief(row.error_kind ?? row.status, 40)),
      ` · ${row.split} step ${count(row.step)} · advantage ${real(row.advantage)}`, row.is_success === null ? "" : row.is_success ? " · success" : " · no success"),
    episode.error ? h("div", { class: "error" }, textBox(episode.error, LIMIT)) : null,
    facts([["expected", Object.keys(verdict.expected).length ? textBox(Object.values(verdict.expected).map((value) => (typeof value === "string" ? value : JSON.stringify(value))).join(" · "), LIMIT) : null],
      ["answer", verdict.answer ? textBox(verdict.answer, LIMIT) : null], ["judge", episode.judgement?.explanation ? textBox(episode.judgement.explanation, LIMIT) : null],
      ["components", components.join(" · ")]]));
}

function conversation({ rows, omitted }) {
  if (!rows.length) return h("p", { class: "soft" }, "Neither episode has messages.");
  return h("div", { class: "aligned" }, rows.map((row) => (row.same ? sameRow(row) : h("div", { class: "pair", tabindex: -1 }, half(row.left, "left", "removed"), half(row.right, "right", "added")))),
    omitted.some(Boolean) ? h("p", { class: "soft" }, `messages left out: ${omitted.map(count).join(" on the left, ")} on the right`) : null);
}

function sameRow({ left }) {
  return h("div", { class: "pair same", tabindex: -1 }, h("div", { class: "message", "data-role": brief(left.role, 20) }, speaker(brief(left.role, 20), "same in both", left.agent),
    textBox(left.pieces.map(([, text]) => text).join(""), LIMIT)));
}

function half(message, side, kind) {
  if (!message) return h("div", { class: "message none" }, h("span", { class: "soft" }, "no such message"));
  return h("div", { class: "message", "data-role": brief(message.role, 20) }, h("span", { class: "side-name soft" }, side), speaker(brief(message.role, 20), "", message.agent),
    h("div", { class: "said", dir: "auto" }, message.pieces.map(([changed, text]) => (changed ? h(kind === "added" ? "ins" : "del", { class: kind }, visibleText(text)) : visibleText(text)))));
}

// A text with control and bidirectional characters replaced by their names.
const visibleText = (text) => [...text].map((character) => (isInvisible(character) ? characterName(character) : character)).join("");

function figuresTable(left, right) {
  const rows = [
    ["run", (side) => brief(side.run, 60)], ["split and step", (side) => `${side.row.split} ${count(side.row.step)}`], ["repeat", (side) => count(side.row.repeat_index)],
    ["status", (side) => brief(side.row.error_kind ?? side.row.status, 40)], ["reward", (side) => real(side.row.reward)], ["advantage", (side) => real(side.row.advantage)],
    ["success", (side) => (side.row.is_success === null ? "–" : share(Number(side.row.is_success)))], ["calls", (side) => count(side.row.calls)], ["forks", (side) => count(side.row.forks)],
    ["samples", (side) => count(side.row.samples)], ["raw tokens", (side) => count(side.row.tokens_raw)], ["distinct tokens", (side) => count(side.row.tokens_distinct)],
    ["trained tokens", (side) => count(side.row.tokens_trained)], ["seconds", (side) => real(side.row.seconds, 1)], ["judge", (side) => brief(side.verdict.judge ?? "–", 80)],
  ];
  return list([["figure", ([name]) => name, true], ["left", ([, value]) => value(left)], ["right", ([, value]) => value(right)]], rows);
}
