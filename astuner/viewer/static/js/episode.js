// One episode: its result, messages, tree of calls and tokens.

import { updateAddress } from "./address.js";
import { chat } from "./chat.js";
import { COLOURS } from "./colours.js";
import { between, brief, count, facts, h, list, plural, real, textBox, tile } from "./dom.js";
import { agentsOfTimeline } from "./timeline.js";
import { tokenView } from "./tokens.js";
import { MAX_TIMELINES, tree } from "./tree.js";
import { verdictCards } from "./verdict.js";

const MAX_BUTTONS = 12;

export function episodeContent(view, query) {
  const number = (name) => (query.has(name) && query.get(name) !== "" ? Number(query.get(name)) || 0 : null);
  const state = { timeline: Math.max(0, (number("timeline") ?? 1) - 1), token: number("token"), colour: COLOURS[query.get("colour")] ? query.get("colour") : "kind" };
  const treeBox = h("details", { class: "card timelines", open: view.timelines.length > 1 });
  const chatBox = h("div", { class: "card" }), tokenBox = h("div", { class: "card" });
  const open = (timeline, token = null) => {
    Object.assign(state, { timeline, token });
    updateAddress({ timeline: timeline + 1, token });
    draw();
  };
  const paint = (colour) => {
    state.colour = colour;
    updateAddress({ colour: colour === "kind" ? null : colour });
  };
  const draw = () => {
    treeBox.replaceChildren(h("summary", {}, `Tree of calls: ${plural(view.timelines.length, "timeline")}`),
      h("div", { class: "tree", tabindex: 0, role: "group", "aria-label": "tree of calls" }, tree(view, state.timeline, (timeline) => open(timeline))), ...others(view, open));
    chatBox.replaceChildren(...messages(view, state.timeline, open));
    const tokens = tokenView(view, state.timeline, state.token, (token) => updateAddress({ token }), state.colour, paint);
    tokenBox.replaceChildren(h("h2", {}, `Tokens of timeline ${state.timeline + 1}`), advantages(view.timelines[state.timeline]),
      ...hints(view), ...tokens.content);
  };
  draw();
  return [heading(view), problems(view), verdictCards(view),
    h("div", { class: "split" }, chatBox, h("div", { class: "aside" }, treeBox, tokenBox)), figures(view)];
}

// Input for the number of a timeline that the tree does not draw.
function others({ timelines }, open) {
  if (timelines.length <= MAX_TIMELINES) return [];
  return [h("label", {}, `the tree shows the first ${MAX_TIMELINES} of ${count(timelines.length)} timelines; open timeline `,
    h("input", { type: "number", min: 1, max: timelines.length, onchange: (event) => open(event.target.value - 1) }))];
}

// Messages of a timeline. Without token ids there are no timelines, and the calls are shown one by one.
function messages(view, timeline, open) {
  const most = (calls) => calls.reduce((best, call) => (view.calls[call].messages.length >= view.calls[best].messages.length ? call : best), calls[0]);
  const found = view.timelines[timeline];
  if (found) return [h("h2", {}, `Messages of timeline ${timeline + 1}`), choice(view, timeline, open), chat(view, most(found.calls))];
  const box = h("div", {}, chat(view, most([...view.calls.keys()])));
  const options = view.calls.map((call, index) => h("option", { value: index, selected: index === most([...view.calls.keys()]) },
    `${index + 1} ${brief(call.agent, 30)}`));
  const callChoice = h("label", {}, "messages of call", h("select", { name: "call", onchange: (event) => box.replaceChildren(chat(view, Number(event.target.value))) }, options));
  return [h("h2", {}, "Messages"), view.calls.length > 1 ? callChoice : null, box].filter(Boolean);
}

// A button per timeline, with the agents that speak in it.
function choice(view, chosen, open) {
  if (view.timelines.length < 2) return h("div");
  const buttons = view.timelines.slice(0, MAX_BUTTONS).map((timeline, index) => h("button", { type: "button", "aria-pressed": String(index === chosen), onclick: () => open(index) },
    `${index + 1} ${brief(agentsOfTimeline(timeline), 40)}`));
  return h("div", { class: "bar timeline-choice", role: "group", "aria-label": "timelines" }, buttons);
}

function heading(view) {
  const { episode } = view;
  const shade = episode.status !== "ok" ? "bad" : episode.is_success ? "good" : "warn";
  return h("div", { class: "heading" }, h("h1", {}, brief(episode.episode_id, 160)),
    h("p", { class: "soft" }, `task ${brief(episode.task_id, 80)} · repeat ${count(episode.repeat_index)} · ${view.split} step ${count(view.step)} · `,
      h("b", { class: shade }, episode.status === "ok" ? `reward ${real(episode.reward)}` : brief(episode.error_kind ?? episode.status, 40)),
      ` · advantage ${real(view.advantage)} · ${plural(view.calls.length, "call")} · ${real(episode.seconds, 1)} s`));
}

function figures(view) {
  const { episode, tokens } = view;
  return h("details", { class: "figures" }, h("summary", {}, "Figures, agents, calls, task and metadata"),
    h("div", { class: "tiles" }, tile("reward", real(episode.reward)), tile("advantage", real(view.advantage)),
      tile("status", brief(episode.error_kind ?? episode.status, 20)), tile("calls", count(view.calls.length)),
      tile("timelines", count(view.timelines.length)), tile("raw tokens", count(tokens.raw)), tile("distinct", count(tokens.distinct)),
      tile(view.split === "val" ? "trainable" : "trained", count(tokens.trained)), tile("seconds", real(episode.seconds, 1))),
    agents(view), calls(view), details(view));
}

// Shown only if it has more information than the tile with the episode's advantage.
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

function problems({ episode, withheld, note }) {
  const listed = (title, lines) => (lines?.length ? h("div", { class: "card note" }, `${title}: `, textBox(lines.join("\n"))) : null);
  return h("div", { class: "problems" }, episode.error ? h("div", { class: "card error" }, textBox(episode.error)) : null,
    episode.error_traceback ? h("details", { class: "traceback" }, h("summary", {}, "traceback"), h("pre", {}, textBox(episode.error_traceback))) : null,
    listed("Degenerate output", episode.anomaly ? [episode.anomaly.text] : []),
    listed("It changed settings of the process, which were restored", episode.process_effects),
    listed("It left processes running, which astuner ended", episode.ended_processes),
    withheld ? h("p", { class: "card note" }, `Not in the record: ${brief(withheld, 200)}`) : null,
    note ? h("p", { class: "card note" }, `This episode is ${note}.`) : null);
}

function hints(view) {
  return view.has_texts ? [] : [h("p", { class: "card note" },
    "The model's tokenizer is not on this machine. Tokens are shown as ids, and template tokens cannot be told apart.")];
}

function calls(view) {
  const numbers = new Map(view.calls.map((call, index) => [call.call_id, index + 1]));
  const fork = (call) => call.fork && h("details", {}, h("summary", { class: "bad" }, brief(call.fork.cause, 40)),
    h("p", {}, `from call ${numbers.get(call.fork.call_id) ?? "?"}, at token ${count(call.fork.position)}, message ${count(call.fork.message_index)}`),
    facts([["expected", textBox(call.fork.expected)], ["found", textBox(call.fork.found)]]));
  const table = list([
    ["call", (call) => numbers.get(call.call_id) === view.episode.anomaly?.call ? h("span", { class: "bad" }, `${numbers.get(call.call_id)} degenerate`) : String(numbers.get(call.call_id))], ["agent", (call) => brief(call.agent || "–", 30), true], ["tag", (call) => brief(call.tag, 30), true],
    ["prompt", (call) => count(call.prompt)], ["completion", (call) => count(call.completion)], ["finish reason", (call) => brief(call.finish_reason, 12), true],
    ["trained", (call) => (call.trained ? "yes" : "no")], ["reward", (call) => real(call.reward)], ["advantage", (call) => real(call.advantage)], ["version", (call) => count(call.policy_version)], ["temperature", (call) => real(call.temperature)],
    ["seconds", (call) => real(call.seconds, 2)], ["fork", (call) => fork(call) ?? "–", true],
  ], view.calls);
  return h("section", {}, h("h2", {}, "Calls"), table);
}

function details({ episode }) {
  return h("section", {}, h("h2", {}, "Task and metadata"), h("div", { class: "card" }, facts([["query", textBox(episode.main_query)],
    ["task metadata", textBox(episode.task_metadata)], ["workflow metadata", textBox(episode.metadata)], ["log_metrics", textBox(episode.log_metrics)]])));
}
