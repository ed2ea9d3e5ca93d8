// Messages as a conversation. Tool calls and results are collapsed.

import { brief, h, textBox } from "./dom.js";

const MAX_MESSAGES = 400;

export function chat(view, callNumber) {
  const call = view.calls[callNumber];
  if (!call) return h("p", { class: "soft" }, "The episode has no calls.");
  const shown = call.messages.slice(-MAX_MESSAGES);
  const left = call.messages.length - shown.length;
  return h("div", { class: "chat" },
    left ? h("p", { class: "soft" }, `the first ${left} messages are omitted`) : null,
    shown.map((number) => bubble(view.messages[number], agentOf(view, number))));
}

// Name of the agent whose call generated a message; "" for other messages.
export function agentOf(view, message) {
  const author = view.authors[message];
  return author === null ? "" : view.calls[author].agent;
}

// One message of a conversation. agent: the agent that wrote it.
export function bubble(message, agent = "") {
  if (message === null || typeof message !== "object") return h("div", { class: "message", tabindex: -1 }, textBox(message));
  const role = brief(message.role ?? "?", 20);
  const body = parts(message.content);
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const thinking = message.reasoning_content ?? message.thinking;
  const folded = role === "tool" && body.length ? [h("details", {}, h("summary", {}, `result ${brief(message.content, 60)}`), ...body)] : body;
  return h("div", { class: "message", "data-role": role, tabindex: -1 }, speaker(role, message.name, agent),
    thinking ? h("details", {}, h("summary", {}, "thinking"), textBox(thinking)) : null,
    folded,
    calls.map((call) => h("details", {}, h("summary", {}, `calls ${brief(call?.function?.name ?? "a tool", 60)}`),
      h("pre", {}, textBox(call?.function?.arguments ?? call)))));
}

export function speaker(role, name, agent) {
  return h("div", { class: "role" }, role, name ? ` · ${brief(name, 40)}` : "", agent ? h("span", { class: "agent" }, brief(agent, 40)) : null);
}

function parts(value) {
  if (value === null || value === undefined || value === "") return [];
  if (!Array.isArray(value)) return [textBox(value)];
  return value.map((part) => textBox(typeof part?.text === "string" ? part.text : part));
}
