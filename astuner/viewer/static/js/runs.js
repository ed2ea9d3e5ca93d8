// The list of runs, from which several can be selected for comparison.

import { fetchJson, link } from "./address.js";
import { brief, count, h, list, real, share, svg } from "./dom.js";
import { polled } from "./polling.js";

const SHADES = { running: "good", stopped: "warn", finished: "soft", failed: "bad", unreadable: "bad" };

export async function runsPage() {
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => {
    location.hash = link("run", { run: [...chosen] });
  } }, "Compare");
  const table = await polled(() => fetchJson("runs"), (runs) => [list(columns(chosen, compare), runs)]);
  const refresh = async () => ((await table.refresh()).some((run) => run.state === "running") ? "● following" : "");
  const intro = h("p", { class: "soft" }, "Select two or more runs to compare them.");
  return { content: [h("h1", {}, "Runs"), intro, h("div", { class: "bar" }, compare), table.box], refresh };
}

function columns(chosen, compare) {
  const tick = (run) => h("input", { type: "checkbox", name: run.name, "aria-label": `compare ${brief(run.name, 40)}`,
    onchange: (event) => {
      if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
      compare.disabled = chosen.size < 2;
      compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
    } });
  const ticked = (run) => { const box = tick(run); box.checked = chosen.has(run.name); return box; };
  return [
    ["", ticked, true],
    ["run", (run) => h("a", { href: link("run", { run: run.name }) }, brief(run.name, 60)), true],
    ["state", (run) => h("span", { class: `pill ${SHADES[run.state]}`, title: run.error && brief(run.error, 300) }, run.state), true],
    ["step", (run) => count(run.counts.step)],
    ["reward", (run) => real(run.rewards.at(-1))],
    ["", (run) => spark(run.rewards)],
    ["validation", (run) => validation(run.validation)],
    ["episodes", (run) => count(run.counts.episodes)],
    ["algorithm", (run) => brief(run.algorithm ?? "–", 20), true],
    ["model", (run) => h("span", { title: brief(run.model, 300) }, brief((run.model ?? "–").split("/").slice(-2).join("/"), 40)), true],
    ["started", (run) => new Date(run.started * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })],
  ];
}

function validation(found) {
  if (!found?.before && !found?.after) return "–";
  return `${share(found.before?.success_rate)} → ${share(found.after?.success_rate)}`;
}

function spark(values) {
  if (values.length < 2) return "";
  const low = Math.min(...values), high = Math.max(...values);
  const points = values.map((value, place) =>
    `${(88 * place) / (values.length - 1) + 1},${19 - (18 * (value - low)) / (high - low || 1)}`);
  return svg("svg", { class: "spark", width: 90, height: 20, "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}
