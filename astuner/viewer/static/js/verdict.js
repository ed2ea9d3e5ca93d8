// The expected answer, the agent's answer and the judge's verdict, side by side.

import { brief, facts, h, real, textBox } from "./dom.js";

const LIMIT = 600;

export function verdictCards({ episode, verdict }) {
  const expected = Object.entries(verdict.expected);
  const card = (title, note, ...content) => h("section", { class: "card", "aria-label": title }, h("h2", {}, title, note ? h("span", { class: "soft" }, ` · ${note}`) : null),
    h("div", { class: "cut", tabindex: 0 }, content));
  return h("div", { class: "outcome" },
    card("Expected", expected.length === 1 ? brief(expected[0][0], 30) : "",
      expected.length === 1 ? textBox(expected[0][1], LIMIT) : expected.length ? facts(expected.map(([name, value]) => [brief(name, 40), textBox(value, LIMIT)]))
        : h("p", { class: "soft" }, "The task's metadata names no answer.")),
    card("Answer", brief(verdict.answer_source, 30),
      verdict.answer ? textBox(verdict.answer, LIMIT) : h("p", { class: "soft" }, "The episode has no answer.")),
    judgementCard(episode, verdict));
}

function judgementCard({ judgement, reward, is_success: success, status }, verdict) {
  const shade = status !== "ok" ? "bad" : success ? "good" : "warn";
  const outcome = success === null ? "" : success ? "success" : "no success";
  const components = Object.entries(judgement?.components ?? {});
  const raw = [["judge", brief(verdict.judge ?? "", 120)], ["parameters", folded(verdict.judge_params)], ["metrics", folded(judgement?.metrics)],
    ["metadata", folded(judgement?.metadata)]].filter(([, value]) => value);
  return h("section", { class: "card judgement", "aria-label": "Judgement" }, h("h2", {}, "Judgement"), h("div", { class: "cut", tabindex: 0 },
    h("p", {}, h("b", { class: shade }, `reward ${real(reward)}`), outcome ? ` · ${outcome}` : ""),
    judgement?.explanation ? textBox(judgement.explanation, LIMIT) : null,
    judgement?.unscored_cause ? h("p", { class: "bad" }, brief(judgement.unscored_cause, 200)) : null,
    components.length ? facts(components.map(([name, value]) => [brief(name, 40), real(value)])) : null,
    raw.length ? h("details", {}, h("summary", {}, "judge, parameters and metrics"), facts(raw)) : null));
}

const folded = (value) => (value && Object.keys(value).length ? textBox(value) : null);
