// Results of each task by step, as a table whose cells are coloured. The numbers in the cells are the text alternative.

import { fetchJson, link, updateAddress } from "./address.js";
import { level, scale } from "./charts.js";
import { brief, count, h, plural } from "./dom.js";

const ROWS = 40;
const ORDERS = { hardest: "hardest first", improved: "most improved first", worse: "most worsened first", name: "in the order of the run" };

export async function taskHeatMap(run, query) {
  const box = h("section", { id: "tasks" });
  const state = { split: query.get("tasks_split") ?? await favourite(run), order: query.get("tasks_order") ?? "hardest", from: Number(query.get("tasks_from")) || 0 };
  let found = null;
  const set = (changes) => {
    Object.assign(state, { from: 0 }, changes);
    updateAddress({ tasks_split: state.split, tasks_order: state.order === "hardest" ? "" : state.order, tasks_from: state.from || "" });
  };
  const choice = (name, title, options) => h("label", {}, title, h("select", { name: `tasks_${name}`,
    onchange: (event) => { set({ [name]: event.target.value }); if (name === "split") refresh(); else draw(); } },
    Object.entries(options).map(([value, text]) => h("option", { value, selected: state[name] === value }, text))));
  const draw = () => {
    const rows = ordered(measured(found), state.order);
    const shown = rows.slice(state.from, state.from + ROWS);
    const go = (from) => () => { set({ from }); draw(); box.querySelector("select").focus(); };
    const pager = h("div", { class: "bar" },
      h("span", { class: "soft" }, rows.length ? `tasks ${count(state.from + 1)}–${count(state.from + shown.length)} of ${count(rows.length)}` : "no tasks"),
      h("button", { type: "button", disabled: state.from === 0, onclick: go(Math.max(0, state.from - ROWS)) }, "← previous"),
      h("button", { type: "button", disabled: state.from + ROWS >= rows.length, onclick: go(state.from + ROWS) }, "next →"));
    box.replaceChildren(h("h2", {}, "Tasks by step"),
      h("p", { class: "soft" }, found.judged ? "The percentage of a task's episodes at a step that succeeded. " : "The mean reward of a task's episodes at a step, in percent of the range of the rewards. ",
        "A cell without a number has no scored episode; ✗: all failed. Select a task to follow it across the steps."),
      h("div", { class: "bar" }, choice("order", "order of the tasks", ORDERS), choice("split", "episodes", { train: "training", val: "validation" }),
        h("span", { class: "chart-legend" }, scale(found.judged ? "solve rate" : "reward"))),
      shown.length ? table(run, found, shown) : h("p", { class: "soft" }, `There are no ${state.split === "val" ? "validation" : "training"} episodes.`), pager);
  };
  const refresh = async () => {
    found = await fetchJson("solve_rates", { run, split: state.split });
    found.judged = found.cells.some((cell) => cell[3]);
    if (state.from >= found.tasks.length) state.from = 0;
    draw();
  };
  await refresh();
  return { box, refresh };
}

// The validation tasks, if no training task occurs at two steps and a validation task does.
async function favourite(run) {
  for (const split of ["train", "val"]) {
    const { tasks, cells } = await fetchJson("solve_rates", { run, split });
    if (cells.length > tasks.length) return split;
  }
  return "train";
}

// The tasks with their cells: a share from 0 to 1, or null without a scored episode.
function measured({ tasks, cells, judged }) {
  const means = cells.filter((cell) => cell[5]).map((cell) => cell[6] / cell[5]);
  const low = Math.min(...means.slice(0, 1), ...chunked(means, Math.min)), high = Math.max(...means.slice(0, 1), ...chunked(means, Math.max));
  const begin = shared(tasks.map(textOf));
  const rows = tasks.map((task) => ({ ...task, label: begin ? `… ${textOf(task).slice(begin)}` : textOf(task), cells: [] }));
  for (const [task, step, episodes, scored, successes, rewarded, total] of cells) {
    const number = judged ? scored : rewarded;
    const sum = judged ? successes : rewarded && (total - low * rewarded) / (high - low || 1);
    rows[task].cells.push({ step, episodes, number, sum });
  }
  return rows;
}

const textOf = (task) => task.query || task.task;

// Length of a long beginning that all texts share, which says nothing in a list; it ends with a word.
function shared(texts) {
  let [common] = texts;
  for (const text of texts) while (!text.startsWith(common)) common = common.slice(0, -1);
  const end = (common ?? "").lastIndexOf(" ") + 1;
  return texts.length > 1 && end > 15 && texts.every((text) => text.length > end) ? end : 0;
}

// Least or greatest of many numbers, in parts that fit into the arguments of a call.
function chunked(values, choose) {
  const parts = [];
  for (let place = 0; place < values.length; place += 10000) parts.push(choose(...values.slice(place, place + 10000)));
  return parts;
}

function ordered(rows, order) {
  const rate = (cells) => {
    const number = cells.reduce((sum, cell) => sum + cell.number, 0);
    return number ? cells.reduce((sum, cell) => sum + cell.sum, 0) / number : null;
  };
  if (order === "name") return rows;
  for (const row of rows) {
    const scored = row.cells.filter((cell) => cell.number);
    const half = Math.ceil(scored.length / 2);
    row.rate = rate(row.cells) ?? -1;
    row.change = scored.length > 1 ? rate(scored.slice(-half)) - rate(scored.slice(0, half)) : 0;
  }
  const key = { hardest: (row) => row.rate, improved: (row) => -row.change, worse: (row) => row.change }[order] ?? ((row) => row.rate);
  return rows.sort((a, b) => key(a) - key(b));
}

function table(run, { steps }, rows) {
  // As many columns as the page has place for; a column may then hold several steps.
  const place = Math.min(document.documentElement.clientWidth, 1500) - (document.documentElement.clientWidth < 700 ? 170 : 380);
  const width = Math.max(1, Math.ceil(steps.length / Math.max(5, Math.floor(place / 31))));
  const columns = Array.from({ length: Math.ceil(steps.length / width) }, (_, number) => steps.slice(number * width, (number + 1) * width));
  const name = (column) => (column.length > 1 ? `${column[0]}–${column.at(-1)}` : `${column[0]}`);
  const every = Math.ceil(columns.length / 24);
  const head = h("tr", {}, h("th", { scope: "col", class: "text" }, "task"), columns.map((column, number) =>
    h("th", { scope: "col", title: `step ${name(column)}` }, number % every === 0 ? column[0] : h("span", { class: "unseen" }, name(column)))));
  const body = rows.map((row) => h("tr", {}, h("th", { scope: "row", class: "text" },
    h("a", { href: link("task", { run, task: row.key }), title: brief(textOf(row), 200) }, brief(row.label, 60))),
  columns.map((column, number) => cell(row.cells.filter(({ step }) => Math.floor(step / width) === number), name(column)))));
  const box = h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "results of the tasks by step" },
    h("table", { class: "heat" }, h("thead", {}, head), h("tbody", {}, body)));
  // The whole row is a target for the pointer; the keyboard uses the link of the task.
  box.addEventListener("click", (event) => { const inside = event.target.closest("td")?.parentElement.querySelector("a"); if (inside) inside.click(); });
  return box;
}

function cell(groups, steps) {
  if (!groups.length) return h("td", {});
  const total = (key) => groups.reduce((sum, group) => sum + group[key], 0);
  const number = total("number"), episodes = total("episodes");
  if (!number) return h("td", { class: "lost", title: `step ${steps}: ${plural(episodes, "episode")} without a score` }, "✗");
  const share = total("sum") / number;
  const lost = episodes - number;
  return h("td", { class: `v${level(share)}`, title: `step ${steps}: ${Math.round(100 * share)} % of ${plural(number, "episode")}${lost ? `, ${count(lost)} without a score` : ""}` },
    String(Math.round(100 * share)));
}
