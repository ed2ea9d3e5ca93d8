// The episodes of a run, with search, filters and pages.

import { answerCell, excerptCell } from "./answers.js";
import { fetchJson, link } from "./address.js";
import { brief, count, h, list, plural, real } from "./dom.js";
import { polled } from "./polling.js";

const PAGE = 100, SEARCHING = 400;
const ORDERS = { latest: "latest first", step: "by step", reward: "best reward first", reward_up: "worst reward first",
  tokens: "most tokens first", forks: "most forks first", seconds: "slowest first" };
const PLACES = { "": "everywhere", answers: "answers of the model", prompts: "other messages", errors: "errors and judges" };
const FIELDS = ["split", "step", "status", "agent", "tag", "finish", "fork", "error", "failure", "least", "most", "text", "where", "order", "offset"];
// Filters that are folded on narrow screens.
const FOLDED = ["step", "agent", "tag", "least", "most", "finish", "fork", "error"];

export async function episodesPage(query) {
  const run = query.get("run");
  const asked = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const offset = Number(asked.offset) || 0;
  let state = "", timer = 0, hasLeft = false;
  const labels = async () => {
    const about = await fetchJson("run", { run });
    state = about.state;
    return { ...about.labels, failures: about.failures.groups };
  };
  const find = () => fetchJson("episodes", { run, limit: PAGE, ...asked });
  const [search, table] = await Promise.all([
    polled(labels, (found) => [filters(run, asked, found), failureNote(run, asked, found.failures)]),
    polled(find, (found) => [searchNote(found), pager(run, asked, found, offset),
      found.rows.length ? list(episodeColumns(run, Boolean(found.search)), found.rows) : h("div"), found.total > PAGE ? pager(run, asked, found, offset) : h("div")]),
  ]);
  // The results of a search that is not complete are renewed more often.
  const watch = async () => {
    clearTimeout(timer);
    const found = await table.refresh();
    if (found.search && !found.search.done && !hasLeft) timer = setTimeout(() => watch().catch(() => {}), SEARCHING);
  };
  timer = setTimeout(() => watch().catch(() => {}), SEARCHING);
  const refresh = async () => {
    await Promise.all([search.refresh(), watch()]);
    return state === "running" ? "● following" : "";
  };
  return { content: [h("h1", {}, "Episodes"), search.box, table.box], refresh, leave: () => { hasLeft = true; clearTimeout(timer); } };
}

// The progress of a search, and its kind.
function searchNote({ search, total }) {
  if (!search) return h("div");
  if (search.error) return h("p", { class: "card note", role: "status" }, search.error);
  const asParts = search.mode === "parts";
  const at = asParts ? search.looked : search.indexed;
  if (!search.done) {
    const text = asParts ? "No text has these words. Looking for them as a part of the texts:" : "Searching:";
    return h("p", { class: "card search-note", role: "status" }, `${text} ${count(at)} of ${count(search.episodes)} episodes so far … `,
      h("progress", { max: search.episodes || 1, value: at, "aria-label": "searched episodes" }));
  }
  const notes = [];
  if (asParts && total) notes.push("No text has these whole words. These texts have them as parts of words.");
  if (search.cut) notes.push(`Of ${plural(search.cut, "long episode")}, only the beginning and the end of each text are searched.`);
  return notes.length ? h("p", { class: "soft search-note", role: "status" }, notes.join(" ")) : h("div");
}

function failureNote(run, asked, groups) {
  if (!asked.failure) return h("div");
  const group = groups.find(({ key }) => key === asked.failure);
  const text = group ? brief(group.error || group.kind || "no message", 300) : "a group of errors that the run does not have now";
  return h("p", { class: "card note" }, "Only episodes that failed with: ", h("b", {}, text), " ",
    h("a", { href: link("episodes", { run, ...asked, failure: "", offset: "" }) }, "show all"));
}

// Link to a task, with the beginning of its query as text and its id as tooltip.
export const taskLink = (run, row, length) => h("a", { title: brief(row.task, 200),
  href: link("group", { run, step: row.step, split: row.split, task: row.task_key }) }, brief(row.query || row.task, length));

export function episodeColumns(run, isSearch = false) {
  return [
    ["episode", (row) => h("a", { href: link("episode", { run, episode: row.key }) }, brief(row.episode, 60)), true],
    ["task", (row) => taskLink(run, row, 40), true],
    isSearch ? ["found", (row) => excerptCell(row.excerpt), true] : null,
    ["answer", (row) => answerCell(run, row), true],
    ["step", (row) => `${row.split} ${row.step}`],
    ["status", (row) => h("span", { class: row.status === "ok" ? "good" : "bad" }, brief(row.error_kind ?? row.status, 30)), true],
    ["reward", (row) => real(row.reward)], ["advantage", (row) => real(row.advantage)],
    ["calls", (row) => count(row.calls)], ["forks", (row) => count(row.forks)], ["samples", (row) => count(row.samples)],
    ["raw", (row) => count(row.tokens_raw)], ["distinct", (row) => count(row.tokens_distinct)], ["trained", (row) => count(row.tokens_trained)],
    ["seconds", (row) => real(row.seconds, 1)],
  ].filter(Boolean);
}

function filters(run, asked, labels) {
  const go = (changes) => { location.hash = link("episodes", { run, ...asked, offset: "", ...changes }); };
  const choice = (name, title, options) => h("label", {}, title,
    h("select", { name, onchange: (event) => go({ [name]: event.target.value }) },
      h("option", { value: "" }, "all"),
      options.map((option) => h("option", { value: option, selected: asked[name] === option }, brief(option, 40)))));
  const field = (name, title, type = "text") => h("label", {}, title, h("input", { name, type, size: 8, step: "any", value: asked[name],
    onchange: (event) => go({ [name]: event.target.value }) }));
  const order = h("label", {}, "order", h("select", { name: "order", onchange: (event) => go({ order: event.target.value }) },
    Object.entries(ORDERS).map(([name, title]) => h("option", { value: name, selected: asked.order === name }, title))));
  const where = h("label", {}, "in", h("select", { name: "where", onchange: (event) => go({ where: event.target.value }) },
    Object.entries(PLACES).map(([name, title]) => h("option", { value: name, selected: asked.where === name }, title))));
  const text = field("text", "search messages, answers, errors and ids", "search");
  text.title = "An episode must have all words. Write \"a phrase\" in quotation marks, and word* for the beginning of a word.";
  const more = h("details", { class: "filters", open: innerWidth > 820 || FOLDED.some((name) => asked[name]) }, h("summary", {}, "more filters"),
    h("div", { class: "bar" }, field("step", "step", "number"), choice("agent", "agent", labels.agent), choice("tag", "tag", labels.tag),
      field("least", "reward from", "number"), field("most", "to", "number"), choice("finish", "finish reason", labels.finish),
      choice("fork", "fork cause", labels.fork), choice("error", "error", labels.error.length ? ["any", ...labels.error] : [])));
  return h("form", { role: "search", onsubmit: (event) => event.preventDefault() },
    h("div", { class: "bar" }, text, where, choice("split", "split", ["train", "val"]), choice("status", "status", ["ok", "failed", "dropped"]), order,
      h("a", { href: link("episodes", { run }) }, "clear")), more);
}

function pager(run, asked, found, offset) {
  const to = (place) => link("episodes", { run, ...asked, offset: place || "" });
  const last = Math.min(offset + PAGE, found.total);
  return h("div", { class: "bar" },
    h("span", { class: "soft", "data-total": found.total }, found.total ? `${count(offset + 1)}–${count(last)} of ${count(found.total)}` : "no episodes"),
    offset > 0 ? h("a", { href: to(Math.max(0, offset - PAGE)) }, "← previous page") : null,
    last < found.total ? h("a", { href: to(offset + PAGE) }, "next page →") : null);
}
