// Whether a run learned, and the results of several runs side by side.

import { link } from "./address.js";
import { brief, count, h, real, share } from "./dom.js";
import { swatch } from "./charts.js";

const SHADES = { learned: "good", worse: "bad", unclear: "warn", nothing: "bad", unmeasured: "soft" };
const WORDS = {
  learned: "learned", worse: "got worse", unclear: "no clear change", nothing: "nothing to learn from", unmeasured: "cannot tell",
};

// The verdict in one word, in its colour.
export const verdictWord = (outcome) => (outcome ? h("span", { class: SHADES[outcome] }, WORDS[outcome]) : "–");

// The verdict on one run.
export function verdict(row, state) {
  const [first, ...others] = row.verdict;
  const so_far = { running: "So far: ", stopped: "Before the run stopped: " }[state] ?? "";
  if (!first) return h("section", { id: "verdict", class: "card" }, h("p", {}, state === "running"
    ? "The run has no results yet." : "The run has no results: it was not validated, and no step was recorded."));
  return h("section", { id: "verdict", class: `card verdict ${SHADES[row.outcome]}` },
    h("p", {}, so_far, h("strong", {}, brief(first, 400))), others.map((line) => h("p", { class: "soft" }, brief(line, 400))),
    row.suggestions.length ? [h("p", {}, "What may help:"), h("ul", {}, row.suggestions.map((text) => h("li", {}, brief(text, 400))))] : null);
}

// A table with one column for each run. The colours are those of the charts.
export function resultTable({ rows, differences }) {
  const rate = (value, interval) => (interval ? [share(value), h("small", { class: "soft" }, ` ${interval.map((end) => (100 * end).toFixed(1)).join(" to ")}`)] : share(value));
  const lines = [
    ["state", (row) => row.state], ["verdict", (row) => verdictWord(row.outcome)],
    ["success before", (row) => rate(row.success_before, row.interval_before)], ["success after", (row) => rate(row.success, row.interval)],
    ["reward, last step", (row) => real(row.reward)], ["KL to the start", (row) => real(row.kl_start, 4)], ["KL of the last update", (row) => real(row.kl_update, 5)],
    ["steps", (row) => count(row.steps)], ["time", (row) => duration(row.seconds)], ["failed episodes", (row) => count(row.failed_episodes)],
    ["tokens, raw", (row) => count(row.tokens?.raw)], ["tokens, distinct", (row) => count(row.tokens?.distinct)], ["tokens, trained", (row) => count(row.tokens?.trained)],
    ["algorithm", (row) => brief(row.algorithm ?? "–", 40)], ["backbone", (row) => brief(row.backbone ?? "–", 40)], ["note", (row) => brief(row.note || "–", 100)],
  ];
  return h("section", { id: "results" }, h("h2", {}, "Results"),
    h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "results of the runs" }, h("table", { class: "list facing" },
      h("thead", {}, h("tr", {}, h("td", {}), rows.map((row, place) => h("th", { scope: "col", class: "text" },
        swatch(place, place), h("a", { href: link("run", { run: row.run }) }, brief(row.run, 40)))))),
      h("tbody", {}, lines.map(([name, value]) => h("tr", {}, h("th", { scope: "row", class: "text" }, name), rows.map((row) => h("td", {}, value(row)))))))),
    differences.map((line) => h("p", { class: "soft" }, brief(line, 300))),
    h("p", { class: "soft" }, "Success is measured by validation; small numbers are 95 % intervals."));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes ? `${minutes} min ` : ""}${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
