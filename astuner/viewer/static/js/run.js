// One run, or several runs side by side: whether they learned, charts, tasks, steps, configuration.

import { fetchJson, link } from "./address.js";
import { asText, brief, count, h, list, real, share, tile } from "./dom.js";
import { failures } from "./failures.js";
import { taskHeatMap } from "./heatmap.js";
import { resultTable, verdict } from "./results.js";
import { snapshot } from "./snapshot.js";
import { loadSeries, renewSeries, runCharts } from "./run_charts.js";

export async function runPage(query) {
  const names = query.getAll("run");
  return names.length > 1 ? comparisonPage(names, query) : singlePage(names[0] ?? "", query);
}

async function singlePage(name, query) {
  const [run, about, results] = await Promise.all([loadSeries(name), fetchJson("run", { run: name }), fetchJson("results", { run: name })]);
  const state = { about, results };
  const top = h("div"), steps = h("div"), tasks = h("div", {}, h("p", { class: "soft" }, "loading the tasks …")), more = h("div");
  const charts = runCharts([run], query);
  const around = () => {
    top.replaceChildren(heading(run, state));
    steps.replaceChildren(stepTable(name, state.about));
  };
  around();
  // The parts below the charts come later, so that the first lines do not wait for them.
  let heat = null;
  const below = async () => {
    try {
      heat = await taskHeatMap(name, query);
      tasks.replaceChildren(heat.box);
      more.replaceChildren(...[await judgedAnew(name), await configuration([name])].filter(Boolean));
    } catch (error) {
      tasks.replaceChildren(h("p", { class: "card error", role: "alert" }, error.message));
    }
  };
  below();
  const refresh = async () => {
    const [metricsChanged, fresh] = await Promise.all([renewSeries(run), fetchJson("run", { run: name })]);
    if (metricsChanged || JSON.stringify(fresh) !== JSON.stringify(state.about)) {
      const more_episodes = fresh.counts.episodes !== state.about.counts.episodes;
      state.about = fresh;
      state.results = await fetchJson("results", { run: name });
      around();
      charts.update();
      if (more_episodes) await heat?.refresh();
    }
    return state.about.state === "running" ? "● following" : "";
  };
  return { content: [top, ...charts.content, tasks, steps, more], refresh };
}

async function comparisonPage(names, query) {
  const [runs, results, settings] = await Promise.all([Promise.all(names.map(loadSeries)), fetchJson("results", { run: names }), configuration(names)]);
  const table = h("div", {}, resultTable(results));
  const charts = runCharts(runs, query);
  let state = JSON.stringify(results), isRunning = true;
  const refresh = async () => {
    const changed = await Promise.all(runs.map(renewSeries));
    if (changed.some(Boolean)) charts.update();
    else if (!isRunning) return "";
    const fresh = await fetchJson("results", { run: names });
    if (JSON.stringify(fresh) !== state) { state = JSON.stringify(fresh); table.replaceChildren(resultTable(fresh)); }
    isRunning = fresh.rows.some((row) => row.state === "running");
    return isRunning ? "● following" : "";
  };
  const [bar, ...drawn] = charts.content;
  return { content: [h("h1", {}, `${names.length} runs`), bar, h("div", { class: "beside" }, h("div", {}, table, settings), h("div", {}, drawn))], refresh };
}

function heading({ name, series }, { about, results }) {
  const last = (metric) => series[metric]?.at(-1)?.[2];
  const bad = about.counts.bad_lines;
  return h("div", {}, h("h1", {}, h("a", { href: link("run", { run: name }) }, brief(name, 80)), " ", h("span", { class: "pill soft" }, about.state)),
    failures(name, about), verdict(results.rows[0], about.state), findings(about.findings),
    h("div", { class: "tiles" }, tile("step", count(about.counts.step)), tile("reward, last step", real(last("reward/mean"))),
      tile("success, last step", share(last("success/rate"))), tile("validation", course(series["val/success_rate"])),
      tile("episodes", count(about.counts.episodes)),
      tile("tokens saved by merging", last("tokens/saving") ? `${real(last("tokens/saving"), 2)}×` : "–")),
    bad ? h("p", { class: "card note" }, `${count(bad)} damaged lines of this record are skipped.`) : null,
    h("p", {}, h("a", { href: link("episodes", { run: name }) }, "All episodes, with search and filters →"),
      snapshot ? null : [" · ", h("a", { href: link("logs", { run: name }) }, "Logs")]));
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

function stepTable(name, about) {
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
async function judgedAnew(name) {
  const rows = await fetchJson("rescores", { run: name });
  if (!rows.length) return null;
  return h("section", { id: "rescores" }, h("h2", {}, "Judged anew"), list([
    ["result", (row) => h("a", { href: link("rescore", { run: name, name: row.name }) }, brief(row.name, 80)), true],
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
