// The list of runs: search, filters, columns, order, notes and tags; several runs can be selected for comparison.

import { fetchJson, link, updateAddress } from "./address.js";
import { brief, count, h, list } from "./dom.js";
import { severity } from "./failures.js";
import { editNote } from "./notes.js";
import { polled } from "./polling.js";
import { COLUMNS, DEFAULT_COLUMNS, metricColumn, metricsOf } from "./run_columns.js";
import { snapshot } from "./snapshot.js";

const SHADES = { running: "good", stopped: "warn", finished: "soft", failed: "bad", unreadable: "bad" };
const FIELDS = ["q", "tag", "state", "backbone", "all", "columns", "sort"];
const STORED = "runs.columns";

export async function runsPage(query) {
  const asked = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  asked.columns ||= localStorage.getItem(STORED) ?? DEFAULT_COLUMNS.join(",");
  const chosen = new Set();
  const compare = h("button", { type: "button", id: "compare", disabled: true, onclick: () => {
    location.hash = link("run", { run: [...chosen] });
  } }, "Compare");
  const counter = h("p", { class: "soft", id: "shown", role: "status" });
  let runs = [];
  const table = h("div");
  const redraw = () => {
    const { shown, hidden } = select(runs, asked);
    bar.fill(runs, hidden);
    counter.textContent = runs.length === 0 ? "There are no runs yet: start one with astuner train --conf FILE."
      : shown.length === runs.length ? `${count(runs.length)} runs; select two or more to compare them.`
        : `${count(shown.length)} of ${count(runs.length)} runs${shown.length ? "" : ": no run matches the filters"}.`;
    const focused = table.contains(document.activeElement) ? document.activeElement.name : "";
    table.replaceChildren(...(shown.length ? [tableOf(shown)] : []));
    if (focused) table.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
  };
  const change = (changes) => {
    Object.assign(asked, changes);
    updateAddress(changes);
    redraw();
  };
  const names = () => asked.columns.split(",").filter(Boolean);
  const bar = filterBar(asked, change, compare, async (columns) => {
    localStorage.setItem(STORED, columns.join(","));
    change({ columns: columns.join(",") });
    await renewed();
  });
  const tableOf = (shown) => {
    const box = list(columnsOf(names(), asked, change, chosen, compare, () => renewed()), shown);
    [...box.querySelectorAll("tbody tr")].forEach((row, place) => {
      if (isFailing(shown[place])) row.classList.add("failing");
    });
    return box;
  };
  // The rows are drawn by `redraw`, which also runs when a filter changes.
  const data = await polled(() => fetchJson("runs", { metric: snapshot ? [] : metricsOf(names()) }), (found) => { runs = found; redraw(); return []; });
  const renewed = async () => { await data.refresh(); redraw(); };
  const refresh = async () => ((await data.refresh()).some((run) => run.state === "running") ? "● following" : "");
  return { content: [h("h1", {}, "Runs"), bar.box, counter, table], refresh };
}

const isFailing = (run) => run.state === "unreadable" || severity(run.counts.failed, run.counts.episodes).severe;
// Debug runs, checks, and runs that a later start has renamed.
const isMinor = (run) => run.is_copy || run.kind === "debug" || run.kind === "check";

function select(runs, asked) {
  const hidden = runs.filter(isMinor);
  // If there is nothing else, nothing is hidden: the first run of most users is a debug run.
  const shownMinor = asked.all === "1" || hidden.length === runs.length;
  const words = asked.q.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (run) => {
    const text = [run.name, run.model, run.algorithm, run.backbone, run.note, run.kind, ...(run.tags ?? [])].join("\n").toLowerCase();
    return words.every((word) => text.includes(word)) && (shownMinor || !isMinor(run)) && (!asked.tag || (run.tags ?? []).includes(asked.tag))
      && (!asked.state || run.state === asked.state) && (!asked.backbone || run.backbone === asked.backbone);
  };
  return { shown: sorted(runs.filter(matches), asked.sort), hidden: hidden.length === runs.length ? 0 : hidden.length };
}

function sorted(runs, sort) {
  const name = sort.replace(/^-/, "");
  const column = name === "run" ? { value: (run) => run.name } : COLUMNS[name] ?? (name ? metricColumn(name) : null);
  if (!column) return runs;
  const sign = sort.startsWith("-") ? -1 : 1;
  const missing = (value) => value === null || value === undefined || value === "";
  return [...runs].sort((left, right) => {
    const [a, b] = [column.value(left), column.value(right)];
    // Runs without a value are the last ones in both directions.
    if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  });
}

function filterBar(asked, change, compare, setColumns) {
  const search = h("input", { type: "search", name: "q", size: 22, value: asked.q, placeholder: "name, note, tag, model",
    oninput: (event) => change({ q: event.target.value }) });
  const selects = Object.fromEntries(["tag", "state", "backbone"].map((name) => [name,
    h("select", { name, onchange: (event) => change({ [name]: event.target.value }) })]));
  const all = h("input", { type: "checkbox", name: "all", checked: asked.all === "1", onchange: (event) => change({ all: event.target.checked ? "1" : "" }) });
  const allText = h("span");
  const allLabel = h("label", { class: "inline" }, all, allText);
  const box = h("form", { class: "bar", role: "search", onsubmit: (event) => event.preventDefault() },
    compare, h("label", {}, "search", search), ...Object.entries(selects).map(([name, select]) => h("label", {}, name, select)),
    allLabel, snapshot ? null : columnChooser(asked, setColumns));
  let drawn = "";
  const fill = (runs, hidden) => {
    allLabel.hidden = hidden === 0;
    allText.textContent = `show ${count(hidden)} debug runs, checks and old copies`;
    const values = { tag: runs.flatMap((run) => run.tags ?? []), state: runs.map((run) => run.state), backbone: runs.map((run) => run.backbone) };
    const options = Object.entries(values).map(([name, found]) => [name, [...new Set([...found, asked[name]])].filter(Boolean).sort()]);
    if (JSON.stringify(options) === drawn) return;
    drawn = JSON.stringify(options);
    for (const [name, found] of options) {
      selects[name].replaceChildren(h("option", { value: "" }, "all"),
        ...found.map((value) => h("option", { value, selected: asked[name] === value }, brief(value, 40))));
      selects[name].closest("label").hidden = found.length < 2 && !asked[name];
    }
  };
  return { box, fill };
}

function columnChooser(asked, setColumns) {
  const options = h("div", { class: "card choices" });
  const chosen = () => asked.columns.split(",").filter(Boolean);
  const option = (name, title) => h("label", { class: "inline" }, h("input", { type: "checkbox", name: `column ${name}`, checked: chosen().includes(name),
    onchange: (event) => setColumns(event.target.checked ? [...chosen(), name] : chosen().filter((other) => other !== name)) }), title);
  const fill = async () => {
    const others = (await fetchJson("metric_names")).filter((name) => !Object.values(COLUMNS).some((column) => column.metric === name));
    options.replaceChildren(...Object.entries(COLUMNS).map(([name, column]) => option(name, column.title)),
      h("details", {}, h("summary", {}, `${count(others.length)} other metrics`), others.map((name) => option(name, brief(name, 60)))));
  };
  return h("details", { class: "chooser", ontoggle: (event) => { if (event.target.open && event.target.matches(".chooser")) fill(); } },
    h("summary", {}, "Columns"), options);
}

function columnsOf(names, asked, change, chosen, compare, renew) {
  const heading = (name, title) => {
    const direction = asked.sort === name ? "▲" : asked.sort === `-${name}` ? "▼" : "";
    const next = asked.sort === `-${name}` ? name : asked.sort === name ? "" : `-${name}`;
    return h("button", { type: "button", class: "sort", name: `sort ${name}`, onclick: () => change({ sort: next }),
      title: direction ? `sorted ${direction === "▲" ? "ascending" : "descending"}` : "sort" }, title, direction ? ` ${direction}` : null);
  };
  const tick = (run) => {
    const box = h("input", { type: "checkbox", name: run.name, "aria-label": `compare ${brief(run.name, 40)}`,
      onchange: (event) => {
        if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
        compare.disabled = chosen.size < 2;
        compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
      } });
    box.checked = chosen.has(run.name);
    return box;
  };
  const shown = names.map((name) => [name, COLUMNS[name] ?? metricColumn(name)]);
  return [
    [h("span", { class: "hidden" }, "compare"), tick, true],
    [heading("run", "run"), (run) => title(run, asked, change, renew), true],
    ["state", state, true],
    ...shown.map(([name, column]) => [heading(name, column.title), column.cell ?? column.value, column.isText]),
  ];
}

function title(run, asked, change, renew) {
  const tags = (run.tags ?? []).map((tag) => h("button", { type: "button", class: "tag", title: "show only this tag",
    onclick: () => change({ tag: asked.tag === tag ? "" : tag }) }, `#${brief(tag, 30)}`));
  return h("div", { class: "run-title" },
    h("a", { href: link("run", { run: run.name }) }, brief(run.name, 60)), " ", tags,
    snapshot ? null : h("button", { type: "button", class: "edit", "aria-label": `edit the note and tags of ${brief(run.name, 40)}`, title: "edit note and tags",
      onclick: () => editNote(run, renew) }, "✎"),
    run.note ? h("div", { class: "soft note-text", title: brief(run.note, 1000) }, brief(run.note, 120)) : null);
}

function state(run) {
  const { failed, episodes } = run.counts;
  const bad = severity(failed, episodes);
  const shade = isFailing(run) ? "bad" : SHADES[run.state];
  return h("span", {}, h("span", { class: `pill ${shade}`, title: run.error && brief(run.error, 300) }, run.state),
    failed ? h("a", { class: "pill badge", href: link("episodes", { run: run.name, status: "failed" }), title: bad.text },
      bad.all ? "all failed" : `${count(failed)} failed`) : null);
}

