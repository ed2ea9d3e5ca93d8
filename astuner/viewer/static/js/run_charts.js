// The charts of one run or of several runs: which metrics they show, and their lines.

import { fetchJson, updateAddress } from "./address.js";
import { chart, histogram, swatch } from "./charts.js";
import { brief, h } from "./dom.js";

const CHARTS = [
  ["Reward", ["reward/mean", "val/reward"]],
  ["Success", ["success/rate", "val/success_rate"]],
  ["Loss", ["loss/total", "loss/policy", "loss/sft", "val/loss"]],
  ["KL to the starting model", ["loss/kl"]],
  ["KL of an update", ["kl/update"]],
  ["KL between sampler and policy", ["kl/rollout"]],
  ["Entropy", ["entropy"]],
  ["Clip fraction", ["clip_fraction"]],
  ["Lengths in tokens", ["length/prompt", "length/response", "length/response_max", "length/sample"]],
  ["Calls and samples per episode", ["episodes/calls", "episodes/samples", "tools/calls"]],
  ["Tools", ["tools/offered", "tools/used", "tools/failed"]],
  ["Tokens", ["tokens/raw", "tokens/distinct", "tokens/trained"]],
  ["Seconds by phase", ["time/rollout", "time/update", "time/step", "time/validation"]],
];
// Several runs: one chart for each metric, one line for each run.
const COMPARED = [
  ["Reward", "reward/mean"], ["Success", "success/rate"], ["Validation: success", "val/success_rate"], ["Validation: reward", "val/reward"],
  ["Loss", "loss/total"], ["Supervised loss", "loss/sft"], ["Validation: loss", "val/loss"], ["KL to the starting model", "loss/kl"],
  ["KL of an update", "kl/update"], ["KL between sampler and policy", "kl/rollout"], ["Entropy", "entropy"], ["Clip fraction", "clip_fraction"],
  ["Answer length in tokens", "length/response"], ["Trained tokens", "tokens/trained"], ["Seconds per step", "time/step"],
];
const BANDED = new Set(["reward/min", "reward/max"]);
const BANDS = { range: "lowest to highest", quantiles: "10 % to 90 %" };

// The name, metrics, charts and validations of a run.
export async function loadSeries(name) {
  const [metrics, episodes] = await Promise.all([fetchJson("metrics", { run: name }), fetchJson("charts", { run: name })]);
  const run = { name, last: metrics.last, generation: metrics.generation, series: metrics.series, ...episodes };
  return Object.assign(run, { times: stepTimes(run) });
}

// Add what was recorded since. Returns whether anything was.
export async function renewSeries(run) {
  const query = { run: run.name, after: run.last, generation: run.generation };
  const [metrics, episodes] = await Promise.all([fetchJson("metrics", query), fetchJson("charts", { run: run.name })]);
  const before = JSON.stringify([run.last, run.generation, run.rewards, run.validations]);
  // The metrics file was rewritten: the response holds all metrics.
  if (metrics.restarted) run.series = {};
  for (const [name, points] of Object.entries(metrics.series)) run.series[name] = [...(run.series[name] ?? []), ...points];
  Object.assign(run, { last: metrics.last, generation: metrics.generation, ...episodes, times: stepTimes(run) });
  return before !== JSON.stringify([run.last, run.generation, run.rewards, run.validations]);
}

export function runCharts(runs, query) {
  const settings = { x: query.get("x") ?? "step", smooth: Number(query.get("smooth") ?? 0), band: query.get("band") ?? "range",
    log: new Set((query.get("log") ?? "").split(",").filter(Boolean)) };
  const hidden = new Set();
  const main = h("div", { class: "charts" }), more = h("div", { class: "charts" });
  let drawn = [], shape = "";
  const redraw = () => {
    const plans = planned(runs);
    shape = JSON.stringify(plans);
    drawn = plans.flatMap((plan) => plots(runs, plan, settings, hidden, redraw));
    main.replaceChildren(...drawn.filter(({ plan }) => plan.known).map(({ plot }) => plot.box));
    more.replaceChildren(...drawn.filter(({ plan }) => !plan.known).map(({ plot }) => plot.box));
  };
  const update = () => {
    if (shape !== JSON.stringify(planned(runs))) redraw();
    else for (const { plot, content } of drawn) plot.update(content());
  };
  redraw();
  const others = h("details", {}, h("summary", {}, "all other metrics"), more);
  const legend = runs.length > 1 ? runLegend(runs, hidden, redraw) : null;
  return { content: [controls(settings, redraw), legend, main, others].filter(Boolean), update };
}

// The charts: [{title, names, known, several}]
function planned(runs) {
  const logged = new Set(runs.flatMap((run) => Object.keys(run.series)));
  for (const run of runs) {
    if (run.validations.some((point) => point.success !== null)) logged.add("val/success_rate");
    if (run.validations.some((point) => point.reward !== null)) logged.add("val/reward");
  }
  const several = runs.length > 1;
  const charts = several ? COMPARED.map(([title, name]) => [title, [name]]) : CHARTS;
  const known = charts.map(([title, names]) => ({ title, names: names.filter((name) => logged.has(name)), known: true, several }));
  const named = new Set(charts.flatMap(([, names]) => names));
  const others = [...logged].filter((name) => !named.has(name) && !BANDED.has(name)).sort()
    .map((name) => ({ title: brief(name, 60), names: [name], known: false, several }));
  return [...known.filter(({ names }) => names.length), ...others];
}

function plots(runs, plan, settings, hidden, redraw) {
  const seconds = settings.x === "seconds";
  const content = () => runs.flatMap((run, place) => plan.names.map((name, index) =>
    line(run, name, plan.several ? { label: brief(run.name, 40), color: place, dash: place } : { label: brief(name, 40), color: index, dash: 0 }, settings, !plan.several)));
  const onLog = (log) => {
    if (log) settings.log.add(plan.title); else settings.log.delete(plan.title);
    updateAddress({ log: [...settings.log].join(",") });
    redraw();
  };
  const banded = !plan.several && plan.names[0] === "reward/mean" && runs[0].rewards.steps.length > 0;
  const tools = banded ? [bandChoice(settings, redraw)] : [];
  const log = settings.log.has(plan.title);
  const plot = chart(plan.title, content(), { seconds, smooth: settings.smooth, log, onLog, legend: !plan.several, hidden, tools });
  const charts = [{ plan, plot, content }];
  if (banded) {
    const rewards = () => runs[0].rewards;
    charts.push({ plan, plot: histogram("Rewards of the episodes", rewards(), (step) => placeOf(runs[0], step, settings), { seconds }), content: rewards });
  }
  return charts;
}

function line(run, name, look, settings, withBand) {
  const at = (step, time) => (settings.x === "seconds" ? time - begin(run) : step);
  let points = (run.series[name] ?? []).map(([step, time, value]) => [at(step, time), value, step]);
  const made = { ...look, markers: name.startsWith("val/") || name === "time/validation", points };
  if (name === "val/success_rate" || name === "val/reward") {
    const key = name === "val/reward" ? "reward" : "success";
    const known = run.validations.map((point) => [placeOf(run, point.step, settings), point]).filter(([x, point]) => x !== null && point[key] !== null);
    made.points = points = known.map(([x, point]) => [x, point[key], point.step]);
    made.intervals = new Map(known.filter(([, point]) => point[`${key}_interval`]).map(([x, point]) => [x, point[`${key}_interval`]]));
  }
  if (name === "reward/mean" && withBand) made.band = band(run, settings, at);
  return made;
}

// Limits of the rewards, from the episodes. Without episodes, the metrics hold the lowest and the highest reward.
function band(run, settings, at) {
  const keys = settings.band === "quantiles" ? ["q10", "q90"] : ["least", "most"];
  const steps = run.rewards.steps.map((step) => [placeOf(run, step.step, settings), step]).filter(([x]) => x !== null);
  if (steps.length) {
    const [low, high] = keys.map((key) => steps.map(([x, step]) => [x, step[key], step.step]));
    return { label: BANDS[settings.band] ?? BANDS.range, low, high };
  }
  const [low, high] = ["reward/min", "reward/max"].map((name) => (run.series[name] ?? []).map(([step, time, value]) => [at(step, time), value, step]));
  return low.length && high.length ? { label: BANDS.range, low, high } : null;
}

const begin = (run) => Math.min(...Object.values(run.series).map((points) => points[0][1]));

// Place of a step on the x axis; null if its time is not known.
const placeOf = (run, step, { x }) => (x === "seconds" ? run.times.get(step) ?? null : step);

// Seconds from the start of the run to each step.
function stepTimes(run) {
  const start = begin(run), times = new Map();
  for (const points of [...Object.values(run.series), run.series["reward/mean"] ?? []]) {
    for (const [step, time] of points) times.set(step, time - start);
  }
  return times;
}

function bandChoice(settings, redraw) {
  return h("select", { class: "small", "aria-label": "band of the rewards", onchange: (event) => {
    settings.band = event.target.value;
    updateAddress({ band: settings.band === "range" ? "" : settings.band });
    redraw();
  } }, Object.entries(BANDS).map(([value, text]) => h("option", { value, selected: settings.band === value }, text)));
}

// One legend for all charts; a click hides a run in all of them.
function runLegend(runs, hidden, redraw) {
  return h("div", { class: "bar runs", role: "group", "aria-label": "runs in the charts" }, runs.map((run, place) =>
    h("button", { type: "button", "aria-pressed": true, onclick: (event) => {
      if (!hidden.delete(place)) hidden.add(place);
      event.currentTarget.setAttribute("aria-pressed", !hidden.has(place));
      redraw();
    } }, swatch(place, place), brief(run.name, 60))));
}

function controls(settings, redraw) {
  const axis = h("select", { onchange: (event) => { settings.x = event.target.value; updateAddress({ x: settings.x === "step" ? "" : settings.x }); redraw(); } },
    ["step", "seconds"].map((name) => h("option", { value: name, selected: settings.x === name }, name)));
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: settings.smooth,
    oninput: (event) => { settings.smooth = Number(event.target.value); updateAddress({ smooth: settings.smooth || "" }); redraw(); } });
  return h("div", { class: "bar" }, h("label", {}, "x axis", axis), h("label", {}, "smoothing of lines", smooth),
    h("span", { class: "soft" }, "Drag in a chart to zoom, double-click to reset. ←/→ reads the values of the chart that has the focus."));
}
