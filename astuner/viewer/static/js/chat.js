// Messages as a conversation; tool calls and results are folded.

import { brief, h, said } from "./dom.js";

const MOST_MESSAGES = 400;

export function chat(view, callNumber) {
  const call = view.calls[callNumber];
  if (!call) return h("p", { class: "soft" }, "No call was made.");
  const shown = call.messages.slice(-MOST_MESSAGES);
  const left = call.messages.length - shown.length;
  return h("div", { class: "chat" },
    left ? h("p", { class: "soft" }, `the first ${left} messages are left out`) : null,
    shown.map((number) => bubble(view.messages[number])));
}

// One message of a conversation.
export function bubble(message) {
  if (message === null || typeof message !== "object") return h("div", { class: "message" }, said(message));
  const role = brief(message.role ?? "?", 20);
  const body = parts(message.content);
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  const thinking = message.reasoning_content ?? message.thinking;
  const folded = role === "tool" && body.length ? [h("details", {}, h("summary", {}, `result ${brief(message.content, 60)}`), ...body)] : body;
  return h("div", { class: "message", "data-role": role }, h("div", { class: "role" }, role, message.name ? ` · ${brief(message.name, 40)}` : ""),
    thinking ? h("details", {}, h("summary", {}, "thinking"), said(thinking)) : null,
    folded,
    calls.map((call) => h("details", {}, h("summary", {}, `calls ${brief(call?.function?.name ?? "a tool", 60)}`),
      h("pre", {}, said(call?.function?.arguments ?? call)))));
}

function parts(value) {
  if (value === null || value === undefined || value === "") return [];
  if (!Array.isArray(value)) return [said(value)];
  return value.map((part) => said(typeof part?.text === "string" ? part.text : part));
}
