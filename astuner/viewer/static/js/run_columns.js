// Columns of the list of runs. `value` is what the column is sorted by, `cell` what it shows.

import { brief, count, h, real, share, svg } from "./dom.js";
import { verdictWord } from "./results.js";

const last = (metric) => (run) => run.last?.[metric];
const ofMetric = (title, metric, show = real) => ({ title, metric, value: last(metric), cell: (run) => show(last(metric)(run)) });

export const COLUMNS = {
  step: { title: "step", value: (run) => run.counts.step, cell: (run) => count(run.counts.step) },
  reward: { title: "reward", metric: "reward/mean", value: (run) => run.rewards.at(-1), cell: (run) => real(run.rewards.at(-1)) },
  curve: { title: "reward by step", value: (run) => run.rewards.at(-1) - run.rewards[0] || 0, cell: (run) => spark(run.rewards) },
  success: ofMetric("success", "success/rate", share),
  validation: { title: "validation", value: (run) => run.validation?.after?.success_rate ?? run.validation?.before?.success_rate, cell: (run) => validation(run.validation) },
  verdict: { title: "verdict", value: (run) => run.verdict, cell: (run) => verdictWord(run.verdict), isText: true },
  val_success: ofMetric("validation success, last", "val/success_rate", share),
  val_reward: ofMetric("validation reward", "val/reward"),
  kl_rollout: ofMetric("KL of the sampler", "kl/rollout"),
  kl_update: ofMetric("KL of the update", "kl/update"),
  loss: ofMetric("loss", "loss/total"),
  entropy: ofMetric("entropy", "entropy"),
  response: ofMetric("answer tokens", "length/response", (value) => real(value, 1)),
  tokens: ofMetric("trained tokens, last step", "tokens/trained", count),
  step_seconds: ofMetric("seconds per step", "time/step", (value) => real(value, 1)),
  seconds: { title: "duration", value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
  episodes: { title: "episodes", value: (run) => run.counts.episodes, cell: (run) => count(run.counts.episodes) },
  failed: { title: "failed", value: (run) => run.counts.failed, cell: (run) => count(run.counts.failed) },
  algorithm: { title: "algorithm", value: (run) => run.algorithm, cell: (run) => brief(run.algorithm ?? "–", 20), isText: true },
  backbone: { title: "backbone", value: (run) => run.backbone, cell: (run) => brief(run.backbone ?? "–", 20), isText: true },
  kind: { title: "kind", value: (run) => run.kind, cell: (run) => run.kind, isText: true },
  model: { title: "model", value: (run) => run.model, isText: true,
    cell: (run) => h("span", { title: brief(run.model, 300) }, brief((run.model ?? "–").split("/").slice(-2).join("/"), 40)) },
  started: { title: "started", value: (run) => run.started,
    cell: (run) => (run.started ? new Date(run.started * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–") },
};

export const DEFAULT_COLUMNS = ["verdict", "step", "reward", "curve", "validation", "model", "started"];

// A column of any other metric.
export const metricColumn = (name) => ofMetric(brief(name, 40), name);

// The metrics of chosen columns, which the server adds to the rows.
export const metricsOf = (names) => names.map((name) => (COLUMNS[name] ? COLUMNS[name].metric : name)).filter(Boolean);

function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${real(seconds, 0)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function validation(found) {
  if (!found?.before && !found?.after) return "–";
  return `${share(found.before?.success_rate)} → ${share(found.after?.success_rate)}`;
}

function spark(values) {
  if (values.length < 2) return "–";
  const low = Math.min(...values), high = Math.max(...values);
  const points = values.map((value, place) =>
    `${(88 * place) / (values.length - 1) + 1},${19 - (18 * (value - low)) / (high - low || 1)}`);
  const title = `from ${real(values[0])} to ${real(values.at(-1))}`;
  return svg("svg", { class: "spark", width: 90, height: 20, role: "img", "aria-label": title }, svg("polyline", { points: points.join(" ") }));
}
