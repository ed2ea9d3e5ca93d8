// Colour scales of the token view. A scale sorts the values of tokens into bins, each with a colour class and a label.

import { count, real } from "./dom.js";

const SEQUENTIAL = ["s0", "s1", "s2", "s3", "s4", "s5"];
const DIVERGING = ["d0", "d1", "d2", "d3", "d4", "d5", "d6"];
export const NO_VALUE = "cn";

const LOGPROBS = [0.9, 0.5, 0.1, 0.01, 0.001].map(Math.log);
const LOGPROB_LABELS = ["p ≥ 0.9", "0.5 – 0.9", "0.1 – 0.5", "0.01 – 0.1", "0.001 – 0.01", "p < 0.001"];
const ENTROPIES = [0.1, 0.5, 1, 2, 4], ENTROPY_LABELS = ["< 0.1", "0.1 – 0.5", "0.5 – 1", "1 – 2", "2 – 4", "≥ 4"];
const RATIOS = [0.5, 0.8, 0.95, 1.05, 1.25, 2];
const RATIO_LABELS = ["< 0.5", "0.5 – 0.8", "0.8 – 0.95", "0.95 – 1.05", "1.05 – 1.25", "1.25 – 2", "≥ 2"];
const STALENESS = [1, 2, 3, 5, 9], STALENESS_LABELS = ["0", "1", "2", "3 – 4", "5 – 8", "≥ 9"];

const above = (bounds) => (value) => bounds.filter((bound) => value >= bound).length;
const below = (bounds) => (value) => bounds.filter((bound) => value < bound).length;

// name in the address: [title, meaning, where the values come from if an episode has none]
export const COLOURS = {
  kind: ["kind"],
  logprob: ["log-probability", "probability of the token when it was sampled; logprob in nats", "the record has no sampled tokens"],
  current: ["current log-probability", "probability of the token in the trainer, before its update changed the weights",
    "computed by the local and verl trainers for tokens with an advantage"],
  advantage: ["advantage", "advantage with which the token was trained", "only training episodes have one, after their update"],
  entropy: ["entropy", "entropy in nats of the trainer's distribution at the token",
    "recorded by the local and verl trainers for tokens with an advantage, not by older versions"],
  ratio: ["ratio", "exp(current − sampled log-probability)", "needs the current log-probability"],
  staleness: ["staleness", "training steps between the weights that sampled the token and those that its update changed", "the record has no sampled tokens"],
};

// Returns the bins as [class, label], and bin(value).
export function scaleOf(name, values) {
  if (name === "logprob" || name === "current") return { bins: zip(SEQUENTIAL, LOGPROB_LABELS), bin: below(LOGPROBS) };
  if (name === "entropy") return { bins: zip(SEQUENTIAL, ENTROPY_LABELS), bin: above(ENTROPIES) };
  if (name === "staleness") return { bins: zip(SEQUENTIAL, STALENESS_LABELS), bin: above(STALENESS) };
  if (name === "ratio") return { bins: zip(DIVERGING, RATIO_LABELS), bin: above(RATIOS) };
  return advantageScale(values);
}

// Thirds of the greatest advantage of the episode, on both sides of zero.
function advantageScale(values) {
  const most = values.reduce((best, value) => (Math.abs(value) > best ? Math.abs(value) : best), 0) || 1;
  const third = most / 3, at = [1, 2, 3].map((part) => real(part * third, 2));
  const labels = [`−${at[2]} … −${at[1]}`, `−${at[1]} … −${at[0]}`, `−${at[0]} … 0`, "0", `0 … ${at[0]}`, `${at[0]} … ${at[1]}`, `${at[1]} … ${at[2]}`];
  const size = (value) => Math.min(2, Math.floor((Math.abs(value) / third) * 0.999999));
  return { bins: zip(DIVERGING, labels), bin: (value) => (value === 0 ? 3 : value < 0 ? 2 - size(value) : 4 + size(value)) };
}

const zip = (classes, labels) => classes.map((name, index) => [name, labels[index]]);

// Least, mean and greatest of the values that are not NaN; null without any.
export function summaryOf(values) {
  let least = Infinity, most = -Infinity, sum = 0, known = 0;
  for (const value of values) {
    if (Number.isNaN(value)) continue;
    least = Math.min(least, value);
    most = Math.max(most, value);
    sum += value;
    known += 1;
  }
  return known ? `${count(known)} tokens: least ${real(least)}, mean ${real(sum / known)}, greatest ${real(most)}` : null;
}
