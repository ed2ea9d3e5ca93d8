// The groups of a step, and the episodes of a group side by side.

import { fetchJson, link } from "./address.js";
import { answerCell } from "./answers.js";
import { bubble } from "./chat.js";
import { pairChooser } from "./chooser.js";
import { taskLink } from "./episodes.js";
import { between, brief, count, h, list, plural, real, share } from "./dom.js";
import { polled } from "./polling.js";

export async function stepPage(query) {
  const run = query.get("run"), step = query.get("step"), split = query.get("split") ?? "train";
  const table = (groups) => list([
    ["task", (row) => taskLink(run, { ...row, step, split }, 80), true],
    ["episodes", (row) => count(row.episodes)], ["failed", (row) => h("span", { class: row.failed ? "bad" : "" }, count(row.failed))],
    ["reward", (row) => real(row.reward)], ["lowest", (row) => real(row.least)], ["highest", (row) => real(row.most)],
    ["success", (row) => share(row.success)], ["forks", (row) => count(row.forks)],
    ["raw", (row) => count(row.tokens_raw)], ["distinct", (row) => count(row.tokens_distinct)], ["trained", (row) => count(row.tokens_trained)],
  ], groups);
  const name = `${split === "val" ? "Validation at step" : "Step"} ${brief(step, 12)}`;
  const { box, refresh } = await polled(() => fetchJson("groups", { run, step, split }),
    (groups) => [h("h1", {}, `${name}: ${plural(groups.length, "group")}`), table(groups)]);
  return { content: [box], refresh: async () => { await refresh(); } };
}

export async function groupPage(query) {
  const asked = { run: query.get("run"), step: query.get("step"), split: query.get("split") ?? "train", task: query.get("task") };
  const chooser = pairChooser(asked.run);
  const { box, refresh } = await polled(() => fetchJson("group", asked), (found) => {
    const [first] = found.rows;
    const title = first ? brief(first.query || first.task, 120) : "This group has no episodes";
    const id = first ? `task ${brief(first.task, 80)} · ` : "";
    const more = found.total > found.rows.length ? ` (the best ${found.rows.length} of ${count(found.total)})` : "";
    return [h("h1", {}, title), h("p", { class: "soft" }, `${id}step ${brief(asked.step, 12)}, sorted by reward${more} · `,
        h("a", { href: link("task", { run: asked.run, task: asked.task }) }, "task over the steps")),
      found.rows.length > 1 ? chooser.bar() : h("div"),
      h("div", { class: "side" }, found.rows.map((row) => column(asked.run, row, chooser)))];
  });
  return { content: [box], refresh: async () => { await refresh(); } };
}

function column(run, row, chooser) {
  const shade = row.status !== "ok" ? "bad" : row.is_success ? "good" : "warn";
  return h("article", { class: "card" },
    h("h2", {}, chooser.box(row), " ", h("a", { href: link("episode", { run, episode: row.key }) }, brief(row.episode, 60))),
    h("p", {}, h("b", { class: shade }, row.reward === null ? brief(row.error_kind ?? row.status, 30) : `reward ${real(row.reward)}`), ` · advantage ${real(row.advantage)}`),
    differs(row) ? h("p", { class: "soft" }, "advantage by agent: ", row.agents.map((agent) => `${brief(agent.agent || "–", 30)} ${between(agent)}`).join(" · ")) : null,
    h("p", { class: "soft" }, `${plural(row.calls, "call")} · ${plural(row.samples, "sample")} · ${count(row.tokens_trained)} trained of ${count(row.tokens_distinct)} tokens · ${real(row.seconds, 1)} s`),
    row.answer ? h("div", { class: "answer-line" }, h("span", { class: "soft" }, "answer: "), answerCell(run, row)) : null,
    row.unreadable ? h("p", { class: "bad" }, brief(row.unreadable, 300)) : null,
    row.transcript.map((message) => bubble(message, message.agent)));
}

// Whether the advantages of the calls differ from the episode's advantage.
const differs = (row) => row.agents.some(({ least, most }) => least !== null && (least !== row.advantage || most !== row.advantage));
