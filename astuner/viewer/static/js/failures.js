// Failed episodes of a run in groups of one error message.

import { link } from "./address.js";
import { brief, count, h, plural } from "./dom.js";
import { snapshot } from "./snapshot.js";

const SHOWN = 5;

// A card for the top of the run's page; null without failed episodes. `about` is the response of the API's `run`.
export function failures(run, about) {
  const found = about.failures;
  if (!found?.episodes) return null;
  const { severe, text } = severity(found.episodes, about.counts.episodes);
  const rows = found.groups.map((group) => failureGroup(run, group));
  const more = found.groups.length - SHOWN;
  return h("section", { id: "failures", class: `card failures ${severe ? "severe" : ""}`, "aria-label": "failed episodes" },
    h("h2", { class: "bad" }, text),
    h("ul", {}, rows.slice(0, SHOWN)),
    more > 0 ? h("details", {}, h("summary", {}, `${plural(more, "more error message")}`), h("ul", {}, rows.slice(SHOWN))) : null,
    found.omitted ? h("p", { class: "soft" }, `${plural(found.omitted, "rarer error message")} not listed.`) : null,
    h("p", {}, h("a", { href: link("episodes", { run, status: "failed" }) }, "All failed episodes"),
      snapshot ? null : [" · ", h("a", { href: link("logs", { run, file: "tracebacks" }) }, "Tracebacks"), " · ",
        h("a", { href: link("logs", { run }) }, "Logs")]));
}

// Severe if at least half of the episodes failed.
export function severity(failed, episodes) {
  const all = failed > 0 && failed >= episodes;
  const severe = failed > 0 && failed * 2 >= episodes;
  const text = all ? (episodes === 1 ? "The only episode failed" : `All ${count(episodes)} episodes failed`)
    : `${count(failed)} of ${plural(episodes, "episode")} failed`;
  return { all, severe, text };
}

function failureGroup(run, group) {
  const steps = group.first_step === group.last_step ? `step ${count(group.first_step)}`
    : `steps ${count(group.first_step)} to ${count(group.last_step)}`;
  const variants = group.messages > 1 ? ` · ${plural(group.messages, "variant")} of the message` : "";
  return h("li", {},
    h("a", { class: "times", href: link("episodes", { run, failure: group.key }) }, `${count(group.episodes)}×`),
    h("div", {}, h("div", { class: "text message-text", title: brief(group.error ?? "", 500) }, brief(group.error || group.kind || "no message", 300)),
      h("div", { class: "soft" }, `${brief(group.kind ?? "–", 60)} · ${steps} · ${plural(group.tasks, "task")}${variants} · `,
        h("a", { href: link("episode", { run, episode: group.episode }) }, "latest episode"))));
}
