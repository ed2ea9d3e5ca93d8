// A run that was judged anew: how rewards, advantages and gradients differ, and the audit.

import { fetchJson, link } from "./address.js";
import { chart } from "./charts.js";
import { brief, count, facts, h, list, real, textBox, tile } from "./dom.js";

const STEPS = 500;

export async function rescorePage(query) {
  const run = query.get("run");
  const view = await fetchJson("rescore", { run, name: query.get("name") });
  const differing = view.steps.filter((step) => step.gradient_differs).length;
  return { content: [
    h("h1", {}, `Judged by ${brief(view.judge, 120)}`),
    h("p", { class: "soft" }, `${brief(view.name, 120)} · advantages of ${brief(view.algorithm, 30)}`),
    h("div", { class: "tiles" }, tile("episodes", count(view.episodes)), tile("changed rewards", count(view.changed)),
      tile("advantages with the other sign", count(view.sign_flips)), tile("Kendall's tau", real(view.kendall_tau)),
      tile("steps with another gradient", `${count(differing)} of ${count(view.steps.length)}`), tile("unscored", count(view.unscored))),
    view.first_error ? h("div", { class: "card error" }, textBox(view.first_error)) : null,
    view.skipped || view.kept ? h("p", { class: "card note" }, `Not judged: ${count(view.skipped)} episodes whose workflow failed, and ${count(view.kept)} with degenerate output.`) : null,
    rewards(view.steps), audit(run, view.audit), steps(run, view.steps), episodes(run, view),
    h("details", {}, h("summary", {}, "parameters of the judge"), textBox(view.params)),
  ].filter(Boolean) };
}

function rewards(rows) {
  if (rows.length < 2) return null;
  const line = (label, color, of) => ({ label, color, dash: 0, points: rows.map((row) => [row.step, of(row)]) });
  const lines = [line("recorded", 0, (row) => row.reward_before), line("new", 1, (row) => row.reward)];
  return h("div", { class: "charts" }, chart("Mean reward", lines, { seconds: false, smooth: 0 }).box);
}

function steps(run, rows) {
  const table = list([
    ["step", (row) => h("a", { href: link("step", { run, step: row.step, split: row.split }) }, `${row.split} ${row.step}`), true],
    ["episodes", (row) => count(row.episodes)], ["reward", (row) => real(row.reward_before)], ["new", (row) => real(row.reward)],
    ["changed", (row) => count(row.changed)], ["flips", (row) => h("span", { class: row.sign_flips ? "warn" : "" }, count(row.sign_flips))],
    ["unscored", (row) => count(row.unscored)], ["tau", (row) => real(row.kendall_tau)], ["similarity", (row) => real(row.similarity)],
    ["gradient", (row) => (row.gradient_differs ? h("span", { class: "warn" }, "differs") : "same"), true],
  ], rows.slice(0, STEPS));
  const more = rows.length > STEPS ? h("p", { class: "soft" }, `the first ${STEPS} of ${count(rows.length)}`) : null;
  return h("section", {}, h("h2", {}, "Steps"), table, more);
}

const episodeLink = (run, row, name) => h("a", { href: link("episode", { run, episode: row.key }) }, brief(name, 60));

function episodes(run, { changed_episodes: rows, changed_total: total }) {
  if (!rows.length) return h("p", { class: "soft" }, "No reward differs.");
  const table = list([
    ["episode", (row) => episodeLink(run, row, row.episode), true], ["step", (row) => count(row.step)],
    ["reward", (row) => real(row.reward_before)], ["new", (row) => real(row.reward)],
    ["advantage", (row) => real(row.advantage_before)],
    ["new", (row) => h("span", { class: row.flips_sign ? "warn" : "" }, real(row.advantage))],
    ["explanation", (row) => brief(row.explanation || "–", 120), true],
  ], rows);
  const more = total > rows.length ? h("p", { class: "soft" }, `${rows.length} of ${count(total)}, those with the other sign first`) : null;
  return h("section", { id: "changed" }, h("h2", {}, "Episodes with another reward"), table, more);
}

function audit(run, found) {
  if (!found) return null;
  const verdict = found.diverges ? h("strong", { class: "bad" }, "diverges") : h("strong", { class: "good" }, "does not diverge");
  const diverging = found.diverging_steps.length ? list([
    ["step", (row) => count(row.step)], ["reward before", (row) => real(row.reward_before)], ["reward", (row) => real(row.reward)],
    ["held-out before", (row) => real(row.held_out_before)], ["held-out", (row) => real(row.held_out)],
  ], found.diverging_steps) : null;
  const apart = found.disagreements.length ? list([
    ["episode", (row) => episodeLink(run, row, row.episode_id), true], ["step", (row) => count(row.step)],
    ["reward", (row) => real(row.reward)], ["held-out", (row) => real(row.held_out_reward)],
    ["rank", (row) => real(row.rank)], ["held-out rank", (row) => real(row.held_out_rank)],
  ], found.disagreements) : null;
  return h("section", { id: "audit" }, h("h2", {}, "Audit"),
    h("div", { class: `card ${found.diverges ? "note" : ""}` },
      h("p", {}, `The reward of ${brief(found.judge, 120)} `, verdict, ` from that of ${brief(found.held_out, 120)}.`),
      facts([["episodes", count(found.episodes)], ["Kendall's tau", real(found.kendall_tau)], ["trend", real(found.trend)], ["held-out trend", real(found.held_out_trend)]])),
    diverging ? [h("h2", {}, "Steps at which the reward rises and the held-out reward falls"), diverging] : null,
    apart ? [h("h2", {}, "Episodes with most disagreement"), apart] : null);
}
