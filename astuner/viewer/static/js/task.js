// One task over the steps of a run: its rewards, its answers, and its episodes.

import { fetchJson, link } from "./address.js";
import { pairChooser } from "./chooser.js";
import { brief, count, h, list, plural, real, share, svg } from "./dom.js";
import { polled } from "./polling.js";
import { copyButton } from "./toolbar.js";

const PAGE = 100, HEIGHT = 150, LEFT = 40, BOTTOM = 18, MOST_POINTS = 400;

export async function taskPage(query) {
  const run = query.get("run"), task = query.get("task");
  const asked = { run, task, split: query.get("split") ?? "", step: query.get("step") ?? "", order: "step", offset: Number(query.get("offset")) || 0, limit: PAGE };
  const go = (changes) => link("task", { run, task, split: asked.split, step: asked.step, offset: "", ...changes });
  const chooser = pairChooser(run);
  const [about, table] = await Promise.all([
    polled(() => fetchJson("task", { run, task }), (found) => overview(run, task, found)),
    polled(() => fetchJson("episodes", asked), (found) => [filters(asked, found, go), chooser.bar(), episodeTable(run, found.rows, chooser), pager(asked, found, go)]),
  ]);
  return { content: [about.box, table.box], refresh: async () => { await Promise.all([about.refresh(), table.refresh()]); } };
}

function overview(run, task, { steps, picks }) {
  if (!steps.length) return [h("h1", {}, "The run has no episode of this task")];
  const [first] = steps;
  const episodes = steps.reduce((sum, row) => sum + row.episodes, 0), failed = steps.reduce((sum, row) => sum + row.failed, 0);
  return [h("h1", {}, brief(first.query || first.task, 160)),
    h("p", { class: "soft" }, `task ${brief(first.task, 80)} · ${plural(episodes, "episode")} in ${plural(new Set(steps.map((row) => row.step)).size, "step")}`, failed ? h("span", { class: "bad" }, ` · ${count(failed)} failed`) : null, " ", copyButton()),
    h("p", {}, ["val", "train"].flatMap((split) => pairs(run, split, picks[split]))),
    h("div", { class: "card" }, strip(run, task, steps), h("div", { class: "legend" }, h("span", {}, h("i", { class: "train-dot" }), "training: mean reward of a step, and its range"),
      h("span", {}, h("i", { class: "val-dot" }), "validation"), h("span", {}, "click a point to open its group")))];
}

// Links to comparisons of the extremes of a split.
function pairs(run, split, { best, worst, first, last }) {
  const pair = (left, right, title) => (left && right && left.key !== right.key
    ? [h("a", { href: link("compare", { run, episode: left.key, with: right.key }) }, title), " · "] : []);
  const links = [...pair(first, last, "the first step with the last"), ...pair(worst, best, "the worst episode with the best")];
  return links.length ? [`${split === "val" ? "validation" : "training"}: compare `, ...links.slice(0, -1), " "] : [];
}

// Rewards by step. Many steps share a point, which then opens the first of them.
function strip(run, task, steps) {
  const known = steps.filter((row) => row.reward !== null);
  if (!known.length) return h("p", { class: "soft" }, "No episode has a reward.");
  const width = Math.max(300, Math.min(1400, innerWidth - 80));
  const all = known.map((row) => row.step), least = Math.min(...all), most = Math.max(...all);
  const low = Math.min(0, ...known.map((row) => row.least)), high = Math.max(1, ...known.map((row) => row.most));
  const x = (step) => LEFT + 8 + ((step - least) / Math.max(1, most - least)) * (width - LEFT - 20);
  const y = (reward) => 8 + (1 - (reward - low) / (high - low)) * (HEIGHT - BOTTOM - 16);
  const axis = [low, (low + high) / 2, high].flatMap((value) => [svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, real(value, 2))]);
  const ends = [...new Set([least, most])].map((step, index) => svg("text", { x: x(step), y: HEIGHT - 2, "text-anchor": index ? "end" : "start" }, `step ${step}`));
  const points = ["train", "val"].flatMap((split) => binned(known.filter((row) => row.split === split), least, most).map((bin) => point(run, task, split, bin, x, y)));
  return svg("svg", { class: "strip", viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "rewards by step; the table below has the values" }, ...axis, ...ends, ...points);
}

function binned(rows, least, most) {
  const width = Math.max(1, Math.ceil((most - least + 1) / MOST_POINTS));
  const bins = new Map();
  for (const row of rows) {
    const place = Math.floor((row.step - least) / width);
    const bin = bins.get(place) ?? { step: row.step, last: row.step, sum: 0, episodes: 0, least: Infinity, most: -Infinity };
    Object.assign(bin, { last: row.step, sum: bin.sum + row.reward * row.episodes, episodes: bin.episodes + row.episodes,
      least: Math.min(bin.least, row.least), most: Math.max(bin.most, row.most) });
    bins.set(place, bin);
  }
  return [...bins.values()];
}

function point(run, task, split, bin, x, y) {
  const mean = bin.sum / bin.episodes, at = x((bin.step + bin.last) / 2);
  const steps = bin.step === bin.last ? `step ${bin.step}` : `steps ${bin.step} to ${bin.last}`;
  const mark = split === "val" ? svg("rect", { class: "val-dot", x: at - 4, y: y(mean) - 4, width: 8, height: 8, transform: `rotate(45 ${at} ${y(mean)})` }) : svg("circle", { class: "train-dot", cx: at, cy: y(mean), r: 3.5 });
  return svg("a", { href: link("group", { run, step: bin.step, split, task }), tabindex: -1 },
    svg("title", {}, `${split} ${steps}: reward ${real(mean)} (${real(bin.least)} to ${real(bin.most)}), ${plural(bin.episodes, "episode")}`),
    svg("line", { class: `range ${split}-dot`, x1: at, x2: at, y1: y(bin.least), y2: y(bin.most) }), mark);
}

function filters(asked, found, go) {
  const choice = h("label", {}, "split", h("select", { name: "split", onchange: (event) => { location.hash = go({ split: event.target.value }); } },
    [["", "all"], ["train", "train"], ["val", "val"]].map(([value, title]) => h("option", { value, selected: value === asked.split }, title))));
  const step = h("label", {}, "step", h("input", { name: "step", type: "number", value: asked.step, onchange: (event) => { location.hash = go({ step: event.target.value }); } }));
  return h("div", { class: "bar" }, choice, step, h("span", { class: "soft", "data-total": found.total }, plural(found.total, "episode")));
}

function episodeTable(run, rows, chooser) {
  const solved = (row) => (row.status !== "ok" ? "bad" : row.is_success ? "good" : "warn");
  return list([
    ["compare", (row) => chooser.box(row)],
    ["step", (row) => h("a", { href: link("group", { run, step: row.step, split: row.split, task: row.task_key }) }, `${row.split} ${row.step}`)],
    ["answer", (row) => h("a", { href: link("episode", { run, episode: row.key }) }, brief(row.answer || row.episode, 160)), true],
    ["reward", (row) => h("b", { class: solved(row) }, row.reward === null ? brief(row.error_kind ?? row.status, 30) : real(row.reward))],
    ["advantage", (row) => real(row.advantage)], ["success", (row) => (row.is_success === null ? "–" : share(Number(row.is_success)))],
    ["calls", (row) => count(row.calls)], ["trained tokens", (row) => count(row.tokens_trained)], ["seconds", (row) => real(row.seconds, 1)],
  ], rows);
}

function pager({ offset }, { total }, go) {
  if (total <= PAGE) return h("div");
  return h("div", { class: "bar" }, offset > 0 ? h("a", { href: go({ offset: Math.max(0, offset - PAGE) || "" }) }, "← previous page") : null,
    h("span", { class: "soft" }, `${count(offset + 1)}–${count(Math.min(total, offset + PAGE))} of ${count(total)}`),
    offset + PAGE < total ? h("a", { href: go({ offset: offset + PAGE }) }, "next page →") : null);
}
