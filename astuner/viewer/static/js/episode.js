// One episode: what became of it, its tree of calls, its messages and its tokens.

import { ask, link, note } from "./address.js";
import { chat } from "./chat.js";
import { between, brief, count, facts, h, list, real, said, tile } from "./dom.js";
import { tokenView } from "./tokens.js";
import { tree } from "./tree.js";

export async function episodePage(query) {
  const asked = { run: query.get("run"), episode: query.get("episode") };
  const view = await ask("episode", asked);
  const row = view.row;
  const back = link("group", { run: asked.run, step: row.step, split: row.split, task: row.task_key });
  return { content: [h("p", {}, h("a", { href: back }, "← its group")), ...episodeContent(view, query)] };
}

export function episodeContent(view, query) {
  const number = (name) => (query.has(name) && query.get(name) !== "" ? Number(query.get(name)) || 0 : null);
  const state = { timeline: Math.max(0, (number("timeline") ?? 1) - 1), token: number("token") };
  const treeBox = h("div", { class: "tree card" }), chatBox = h("div", { class: "card" }), tokenBox = h("div", { class: "card" });
  const open = (timeline, token = null) => {
    Object.assign(state, { timeline, token });
    note({ timeline: timeline + 1, token });
    draw();
  };
  const draw = () => {
    treeBox.replaceChildren(tree(view, state.timeline, (timeline) => open(timeline)));
    const calls = view.timelines[state.timeline]?.calls ?? [];
    const longest = calls.reduce((best, call) => (best === undefined || view.calls[call].messages.length >= view.calls[best].messages.length ? call : best), undefined);
    chatBox.replaceChildren(h("h2", {}, `Messages of timeline ${state.timeline + 1}`), chat(view, longest ?? 0));
    const tokens = tokenView(view, state.timeline, state.token, (token) => note({ token }));
    tokenBox.replaceChildren(h("h2", {}, `Tokens of timeline ${state.timeline + 1}`), advantages(view.timelines[state.timeline]),
      ...hints(view), ...tokens.content);
  };
  draw();
  const forks = view.timelines.length > 1 ? "Timelines" : "Timeline";
  return [heading(view), problems(view), h("h2", {}, `${forks}: the tree of calls`), treeBox,
    h("div", { class: "split" }, chatBox, tokenBox), agents(view), calls(view), details(view)];
}

function heading(view) {
  const { episode, tokens } = view;
  return h("div", {}, h("h1", {}, brief(episode.episode_id, 160)),
    h("p", { class: "soft" }, `task ${brief(episode.task_id, 80)} · repeat ${count(episode.repeat_index)} · ${view.split} step ${count(view.step)}`),
    h("div", { class: "tiles" }, tile("reward", real(episode.reward)), tile("advantage", real(view.advantage)),
      tile("status", brief(episode.error_kind ?? episode.status, 20)), tile("calls", count(view.calls.length)),
      tile("timelines", count(view.timelines.length)), tile("raw tokens", count(tokens.raw)), tile("distinct", count(tokens.distinct)),
      tile("trained", count(tokens.trained)), tile("seconds", real(episode.seconds, 1))));
}

// Only where there is more to say than the tile of the episode's one advantage.
function agents({ agents: rows, advantage }) {
  if (rows.length < 2 && rows.every(({ least, most, reward }) => reward === null && least === most && [null, advantage].includes(least))) return h("div");
  return h("section", {}, h("h2", {}, "Agents"), list([
    ["agent", (row) => brief(row.agent || "–", 40), true], ["calls", (row) => count(row.calls)],
    ["reward", (row) => real(row.reward)], ["advantage", (row) => between(row)],
  ], rows));
}

function advantages(timeline) {
  const trained = (timeline?.agents ?? []).filter(({ least }) => least !== null);
  if (!trained.length) return h("div");
  const named = trained.length > 1 || timeline.agents.length > 1;
  return h("p", { class: "soft" }, "advantage ", trained.map((row) => (named ? `${brief(row.agent || "–", 30)} ` : "") + between(row)).join(" · "));
}

function problems({ episode, withheld }) {
  return h("div", {}, episode.error ? h("div", { class: "card error" }, said(episode.error)) : null,
    withheld ? h("p", { class: "card note" }, `Left out of the record: ${brief(withheld, 200)}`) : null);
}

function hints(view) {
  return view.has_texts ? [] : [h("p", { class: "card note" },
    "Ids only: the model's tokenizer is not on this machine, so texts are not known, nor which tokens are the template's.")];
}

function calls(view) {
  const numbers = new Map(view.calls.map((call, index) => [call.call_id, index + 1]));
  const fork = (call) => call.fork && h("details", {}, h("summary", { class: "bad" }, brief(call.fork.cause, 40)),
    h("p", {}, `from call ${numbers.get(call.fork.call_id) ?? "?"}, at token ${count(call.fork.position)}, message ${count(call.fork.message_index)}`),
    facts([["expected", said(call.fork.expected)], ["found", said(call.fork.found)]]));
  const table = list([
    ["call", (call) => String(numbers.get(call.call_id))], ["agent", (call) => brief(call.agent || "–", 30), true], ["tag", (call) => brief(call.tag, 30), true],
    ["prompt", (call) => count(call.prompt)], ["answer", (call) => count(call.completion)], ["ended", (call) => brief(call.finish_reason, 12), true],
    ["trained", (call) => (call.trained ? "yes" : "no")], ["reward", (call) => real(call.reward)], ["advantage", (call) => real(call.advantage)], ["version", (call) => count(call.policy_version)], ["temperature", (call) => real(call.temperature)],
    ["seconds", (call) => real(call.seconds, 2)], ["fork", (call) => fork(call) ?? "–", true],
  ], view.calls);
  return h("section", {}, h("h2", {}, "Calls"), table);
}

function details({ episode }) {
  return h("details", {}, h("summary", {}, "task and metadata"), facts([["query", said(episode.main_query)],
    ["task's data", said(episode.task_metadata)], ["workflow's metadata", said(episode.metadata)], ["log_metrics", said(episode.log_metrics)]]));
}
