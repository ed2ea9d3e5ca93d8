// One run, or several runs in one chart: charts, steps, configuration.

import { fetchJson, link, updateAddress } from "./address.js";
import { chart } from "./charts.js";
import { asText, brief, count, h, list, real, share, tile } from "./dom.js";
import { failures } from "./failures.js";

const CHARTS = [
  ["Reward", ["reward/mean", "reward/min", "reward/max", "val/reward"]],
  ["Success", ["success/rate", "val/success_rate"]],
  ["Loss", ["loss/total", "loss/policy", "loss/kl", "loss/sft", "val/loss"]],
  ["KL", ["kl/update", "kl/rollout"]],
  ["Entropy", ["entropy"]],
  ["Clip fraction", ["clip_fraction"]],
  ["Lengths in tokens", ["length/prompt", "length/response", "length/response_max", "length/sample"]],
  ["Calls and samples per episode", ["episodes/calls", "episodes/samples"]],
  ["Tokens", ["tokens/raw", "tokens/distinct", "tokens/trained"]],
  ["Seconds by phase", ["time/rollout", "time/update", "time/step", "time/validation"]],
];
const KNOWN = new Set(CHARTS.flatMap(([, names]) => names));

export async function runPage(query) {
  const names = query.getAll("run");
  const runs = await Promise.all(names.map((run) => load(run)));
  const settings = { x: query.get("x") ?? "step", smooth: Number(query.get("smooth") ?? 0) };
  const charts = h("div", { class: "charts" }), more = h("div", { class: "charts" }), steps = h("div"), top = h("div");
  let drawn = [];
  const redraw = () => {
    drawn = chartedMetrics(runs).map(([title, metrics]) => [metrics, chart(title, lines(runs, metrics, settings),
      { seconds: settings.x === "seconds", smooth: settings.smooth })]);
    const known = drawn.filter(([metrics]) => KNOWN.has(metrics[0])), other = drawn.filter(([metrics]) => !KNOWN.has(metrics[0]));
    charts.replaceChildren(...known.map(([, plot]) => plot.box));
    more.replaceChildren(...other.map(([, plot]) => plot.box));
  };
  const around = () => {
    top.replaceChildren(...runs.map((run) => heading(run, runs.length > 1)));
    steps.replaceChildren(...(runs.length === 1 ? [stepTable(runs[0])] : []));
  };
  redraw();
  around();
  const refresh = async () => {
    const seen = () => [JSON.stringify(chartedMetrics(runs)), JSON.stringify(runs.map((run) => run.about))];
    const before = seen();
    await Promise.all(runs.map((run) => renew(run)));
    const after = seen();
    if (before[1] !== after[1]) around();
    if (before[0] !== after[0]) redraw();
    else if (before[1] !== after[1]) for (const [metrics, plot] of drawn) plot.update(lines(runs, metrics, settings));
    return runs.some((run) => run.about.state === "running") ? "● following" : "";
  };
  const others = h("details", {}, h("summary", {}, "all other metrics"), more);
  const content = [top, controls(settings, redraw), charts, others, steps, await judgedAnew(names), await configuration(names)];
  return { content, refresh };
}

async function load(name) {
  const [about, metrics] = await Promise.all([fetchJson("run", { run: name }), fetchJson("metrics", { run: name })]);
  return { name, about, last: metrics.last, generation: metrics.generation, series: metrics.series };
}

async function renew(run) {
  const query = { run: run.name, after: run.last, generation: run.generation };
  const [about, update] = await Promise.all([fetchJson("run", { run: run.name }), fetchJson("metrics", query)]);
  Object.assign(run, { about, last: update.last, generation: update.generation });
  // The metrics file was rewritten: the response holds all metrics.
  if (update.restarted) run.series = {};
  for (const [name, points] of Object.entries(update.series)) run.series[name] = [...(run.series[name] ?? []), ...points];
}

function chartedMetrics(runs) {
  const logged = new Set(runs.flatMap((run) => Object.keys(run.series)));
  const known = CHARTS.map(([title, names]) => [title, names.filter((name) => logged.has(name))]);
  const others = [...logged].filter((name) => !KNOWN.has(name)).sort().map((name) => [brief(name, 60), [name]]);
  return [...known.filter(([, names]) => names.length), ...others];
}

function lines(runs, metrics, { x }) {
  const several = runs.length > 1;
  return runs.flatMap((run, place) => metrics.map((name, index) => {
    const begin = Math.min(...Object.values(run.series).map((points) => points[0][1]));
    return {
      label: several ? `${brief(run.name, 24)} ${brief(name, 40)}` : brief(name, 40),
      color: several ? place : index, dash: several ? index : 0,
      points: (run.series[name] ?? []).map(([step, time, value]) => [x === "seconds" ? time - begin : step, value]),
    };
  }));
}

function controls(settings, redraw) {
  const axis = h("select", { onchange: (event) => { settings.x = event.target.value; updateAddress({ x: settings.x }); redraw(); } },
    ["step", "seconds"].map((name) => h("option", { value: name, selected: settings.x === name }, name)));
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: settings.smooth,
    oninput: (event) => { settings.smooth = Number(event.target.value); updateAddress({ smooth: settings.smooth || "" }); redraw(); } });
  return h("div", { class: "bar" }, h("label", {}, "x axis", axis), h("label", {}, "smoothing", smooth),
    h("span", { class: "soft" }, "drag in a chart to zoom, double-click to reset"));
}

function heading({ name, about, series }, small) {
  const last = (metric) => series[metric]?.at(-1)?.[2];
  const row = h("h1", {}, h("a", { href: link("run", { run: name }) }, brief(name, 80)), " ", h("span", { class: "pill soft" }, about.state));
  if (small) return row;
  const bad = about.counts.bad_lines;
  return h("div", {}, row, failures(name, about), findings(about.findings),
    h("div", { class: "tiles" }, tile("step", count(about.counts.step)), tile("reward, last step", real(last("reward/mean"))),
      tile("success, last step", share(last("success/rate"))), tile("validation", course(series["val/success_rate"])),
      tile("episodes", count(about.counts.episodes)),
      tile("tokens saved by merging", last("tokens/saving") ? `${real(last("tokens/saving"), 2)}×` : "–")),
    bad ? h("p", { class: "card note" }, `${count(bad)} damaged lines of this record are skipped.`) : null,
    h("p", {}, h("a", { href: link("episodes", { run: name }) }, "All episodes, with search and filters →")));
}

// What the checks found, errors first.
function findings(found) {
  if (!found.length) return null;
  const steps = ({ first_step: first, last_step: last }) =>
    (first === last ? (first ? `step ${count(first)}` : "start") : `${first ? `step ${count(first)}` : "start"} to ${count(last)}`);
  return h("section", { id: "findings" }, found.map((row) => h("div", { class: "card note" },
    h("p", {}, h("strong", { class: row.severity === "error" ? "bad" : "warn" }, row.severity), ` ${brief(row.check, 60)}, ${steps(row)}`),
    h("p", {}, brief(row.message, 1000)), h("p", { class: "soft" }, `To fix it: ${brief(row.fix, 1000)}`))));
}

// Success of the first and the last validation.
function course(points) {
  const ends = [...new Set([points?.at(0), points?.at(-1)])].filter(Boolean);
  return ends.map(([, , value]) => share(value)).join(" → ") || "–";
}

function stepTable({ name, about }) {
  if (!about.steps.length) return h("p", { class: "soft" }, "No episodes are recorded.");
  const shown = about.steps.slice(0, 500);
  const table = list([
    ["step", (row) => h("a", { href: link("step", { run: name, step: row.step, split: row.split }) }, `${row.split} ${row.step}`), true],
    ["groups", (row) => count(row.groups)], ["episodes", (row) => count(row.episodes)],
    ["reward", (row) => real(row.reward)], ["success", (row) => share(row.success)],
    ["failed", (row) => h("span", { class: row.failed ? "bad" : "" }, count(row.failed))],
    ["calls", (row) => count(row.calls)], ["forks", (row) => count(row.forks)], ["samples", (row) => count(row.samples)],
    ["raw", (row) => count(row.tokens_raw)], ["distinct", (row) => count(row.tokens_distinct)], ["trained", (row) => count(row.tokens_trained)],
  ], shown);
  const more = about.steps.length > shown.length ? h("p", { class: "soft" }, `the last ${shown.length} of ${about.steps.length}`) : null;
  return h("section", {}, h("h2", {}, "Steps"), table, more);
}

// Results of astuner rescore.
async function judgedAnew(names) {
  const rows = names.length === 1 ? await fetchJson("rescores", { run: names[0] }) : [];
  if (!rows.length) return "";
  return h("section", { id: "rescores" }, h("h2", {}, "Judged anew"), list([
    ["result", (row) => h("a", { href: link("rescore", { run: names[0], name: row.name }) }, brief(row.name, 80)), true],
    ["judge", (row) => brief(row.judge, 80), true], ["episodes", (row) => count(row.episodes)], ["changed", (row) => count(row.changed)],
    ["flips", (row) => count(row.sign_flips)], ["tau", (row) => real(row.kendall_tau)],
    ["audit", (row) => (row.diverges ? h("span", { class: "bad" }, "diverges") : "–"), true],
  ], rows));
}

async function configuration(names) {
  const { configs, differs } = await fetchJson("config", { run: names });
  const cell = (value, from = 0) => (value === undefined || value === null ? "–" : `${from ? "…" : ""}${brief(asText(value).slice(from), 200)}`);
  if (names.length > 1) {
    const columns = [["key", (row) => brief(row.key), true],
      ...names.map((name, place) => [brief(name, 40), (row) => cell(row.values[place], firstDifference(row.values)), true])];
    const body = differs.length ? list(columns, differs) : h("p", { class: "soft" }, "The configurations are equal.");
    return h("section", { id: "differs" }, h("h2", {}, "Differences of the configurations"), body);
  }
  const rows = Object.entries(configs[0] ?? {});
  return h("details", {}, h("summary", {}, `configuration (${rows.length} keys)`),
    list([["key", ([key]) => brief(key), true], ["value", ([, value]) => cell(value), true]], rows));
}

// Offset from which long values are shown, so that their difference is visible.
function firstDifference(values) {
  const texts = values.map(asText);
  let place = 0;
  while (place < texts[0].length && texts.every((text) => text[place] === texts[0][place])) place += 1;
  return place > 100 ? place - 40 : 0;
}
