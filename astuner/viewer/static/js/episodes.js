// The episodes of a run, with search, filters and pages.

import { fetchJson, link } from "./address.js";
import { brief, count, h, list, real } from "./dom.js";
import { polled } from "./polling.js";

const PAGE = 100;
const ORDERS = { latest: "latest first", step: "by step", reward: "best reward first", reward_up: "worst reward first",
  tokens: "most tokens first", forks: "most forks first", seconds: "slowest first" };
const FIELDS = ["split", "step", "status", "agent", "tag", "finish", "fork", "error", "failure", "least", "most", "text", "order", "offset"];

export async function episodesPage(query) {
  const run = query.get("run");
  const asked = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const offset = Number(asked.offset) || 0;
  let state = "";
  const labels = async () => { const about = await fetchJson("run", { run }); state = about.state; return about.labels; };
  const find = () => fetchJson("episodes", { run, limit: PAGE, ...asked });
  const [search, table] = await Promise.all([
    polled(labels, (found) => [filters(run, asked, found)]),
    polled(find, (found) => [pager(run, asked, found, offset), list(episodeColumns(run), found.rows), pager(run, asked, found, offset)]),
  ]);
  const refresh = async () => {
    await Promise.all([search.refresh(), table.refresh()]);
    return state === "running" ? "● following" : "";
  };
  return { content: [h("h1", {}, "Episodes"), search.box, table.box], refresh };
}

// Link to a task, with the beginning of its query as text and its id as tooltip.
export const taskLink = (run, row, length) => h("a", { title: brief(row.task, 200),
  href: link("group", { run, step: row.step, split: row.split, task: row.task_key }) }, brief(row.query || row.task, length));

export function episodeColumns(run) {
  return [
    ["episode", (row) => h("a", { href: link("episode", { run, episode: row.key }) }, brief(row.episode, 60)), true],
    ["task", (row) => taskLink(run, row, 40), true],
    ["step", (row) => `${row.split} ${row.step}`],
    ["status", (row) => h("span", { class: row.status === "ok" ? "good" : "bad" }, brief(row.error_kind ?? row.status, 30)), true],
    ["reward", (row) => real(row.reward)], ["advantage", (row) => real(row.advantage)],
    ["calls", (row) => count(row.calls)], ["forks", (row) => count(row.forks)], ["samples", (row) => count(row.samples)],
    ["raw", (row) => count(row.tokens_raw)], ["distinct", (row) => count(row.tokens_distinct)], ["trained", (row) => count(row.tokens_trained)],
    ["seconds", (row) => real(row.seconds, 1)],
  ];
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
  return h("form", { class: "bar", role: "search", onsubmit: (event) => event.preventDefault() },
    field("text", "search tasks, ids and errors", "search"), choice("split", "split", ["train", "val"]), field("step", "step", "number"),
    choice("status", "status", ["ok", "failed", "dropped"]), choice("agent", "agent", labels.agent), choice("tag", "tag", labels.tag),
    field("least", "reward from", "number"), field("most", "to", "number"), choice("finish", "finish reason", labels.finish),
    choice("fork", "fork cause", labels.fork), choice("error", "error", labels.error.length ? ["any", ...labels.error] : []), order,
    h("a", { href: link("episodes", { run }) }, "clear"));
}

function pager(run, asked, found, offset) {
  const to = (place) => link("episodes", { run, ...asked, offset: place || "" });
  const last = Math.min(offset + PAGE, found.total);
  return h("div", { class: "bar" },
    h("span", { class: "soft", "data-total": found.total }, found.total ? `${count(offset + 1)}–${count(last)} of ${count(found.total)}` : "no episodes"),
    offset > 0 ? h("a", { href: to(Math.max(0, offset - PAGE)) }, "← previous page") : null,
    last < found.total ? h("a", { href: to(offset + PAGE) }, "next page →") : null);
}
