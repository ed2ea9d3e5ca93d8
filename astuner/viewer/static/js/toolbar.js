// Links and buttons at the top of the pages of an episode and of a comparison.

import { fetchJson, link } from "./address.js";
import { brief, count, h, real } from "./dom.js";
import { placeInList } from "./list_order.js";
import { snapshot } from "./snapshot.js";

const PICKS = { best: "best", worst: "worst", first: "first step", last: "last step" };

export function episodeToolbar(run, view) {
  const { row, picks, neighbours } = view;
  const query = { run, step: row.step, split: row.split, task: row.task_key };
  const place = placeInList(run, row.key);
  const to = (key) => key && link("episode", { run, episode: key });
  const [previous, next] = place ? [place.previous, place.next] : [to(neighbours.previous), to(neighbours.next)];
  const name = place ? "list" : "step";
  const comparisons = Object.entries(PICKS)
    .filter(([pick]) => picks[pick] && picks[pick].key !== row.key)
    .map(([pick, title]) => h("a", { href: link("compare", { run, episode: row.key, with: picks[pick].key }), title: describe(picks[pick]) }, title));
  return h("nav", { class: "bar tools", "aria-label": "Episode" },
    h("a", { href: link("group", query) }, "← group"), h("a", { href: link("task", { run, task: row.task_key }) }, "task over the steps"),
    previous ? h("a", { href: previous, "data-key": "previous" }, `← previous in ${name}`) : null,
    next ? h("a", { href: next, "data-key": "next" }, `next in ${name} →`) : null,
    place ? h("span", { class: "soft" }, `${count(place.at)} of ${count(place.of)}`) : null,
    h("span", { class: "push" }, comparisons.length ? ["compare with the ", dotted(comparisons)] : "no other episode of this task"),
    copyButton(), ...(snapshot ? [] : ["html", "json"]).map((format) => h("a", { href: exportAddress(run, row.key, format), download: true }, `download ${format.toUpperCase()}`)));
}

const dotted = (parts) => parts.flatMap((part, index) => (index ? [" · ", part] : [part]));
const describe = (row) => `step ${row.step}, reward ${real(row.reward)}: ${brief(row.episode, 80)}`;
const exportAddress = (run, episode, format) => `api/export?${link("", { run, episode, format }).slice(3)}`;

export function copyButton() {
  const button = h("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      said.textContent = "copied";
    } catch {
      said.textContent = "the browser does not allow it; copy the address bar";
    }
    setTimeout(() => { said.textContent = ""; }, 2000);
  } }, "copy link");
  const said = h("span", { class: "soft", role: "status" });
  return h("span", {}, button, " ", said);
}

// Links to the extremes of a task in a run, for one side of a comparison. go(run, key) opens an episode.
export function sidePicker(side, runs, go) {
  const box = h("span", {});
  const show = (run, picks) => box.replaceChildren(...Object.entries(PICKS).filter(([pick]) => picks[pick]).flatMap(([pick, title]) => [" ",
    h("button", { type: "button", title: describe(picks[pick]), "aria-pressed": String(run === side.run && picks[pick].key === side.row.key),
      onclick: () => go(run, picks[pick].key) }, title)]));
  show(side.run, side.picks);
  const change = async (event) => {
    const run = event.target.value;
    box.replaceChildren(h("span", { class: "soft" }, " loading …")); // the buttons are those of the other run
    const picks = await fetchJson("picks", { run, task: side.row.task_key, split: side.row.split });
    if (Object.values(picks).some(Boolean)) show(run, picks);
    else box.replaceChildren(h("span", { class: "soft" }, " the run has no episode of this task"));
  };
  const choice = h("label", {}, "run", h("select", { name: "side-run", onchange: change }, runs.map((name) => h("option", { value: name, selected: name === side.run }, brief(name, 50)))));
  return h("div", { class: "bar" }, choice, box);
}
