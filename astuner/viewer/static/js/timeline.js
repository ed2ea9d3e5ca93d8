// The tokens of one timeline, with the details of each token.

const PROMPT = 0, TEMPLATE = 1, TRAINED = 2, UNTRAINED = 3, ELSEWHERE = 4;

// Names of the kinds of tokens. Tokens of validation episodes have a mask but are not trained.
export function kindNames({ split }) {
  const trained = split === "val" ? "trainable" : "trained";
  return ["prompt", "template", `generated, ${trained}`, `generated, not ${trained}`, `generated, ${trained} in another timeline`];
}

// Names of the agents that speak in a timeline.
export const agentsOfTimeline = ({ agents }) => agents.map(({ agent }) => agent).filter(Boolean).join(", ");

// A sample belongs to a timeline if all its calls are on it. A tree sample belongs to all timelines.
export function readTimeline(view, number) {
  const timeline = view.timelines[number];
  const ids = [], kinds = [], places = [];
  if (!timeline) return { ids, kinds, at: () => null, values: () => [] };
  const onIt = new Set(timeline.calls.map((call) => view.calls[call].call_id));
  const own = new Set(view.samples.flatMap((sample, index) => (sample.is_tree || sample.calls.every((call) => onIt.has(call)) ? [index] : [])));
  for (const segmentNumber of timeline.segments) {
    const segment = view.segments[segmentNumber];
    const first = ids.length;
    for (const id of segment.ids) { ids.push(id); kinds.push(PROMPT); places.push(segmentNumber); }
    for (const [from, to] of segment.template) kinds.fill(TEMPLATE, first + from, first + to);
    for (const run of segment.sampled) kinds.fill(UNTRAINED, first + run.from, first + run.from + run.logprobs.length);
    for (const { sample, from, to, mask } of segment.trained) {
      if (!mask) continue;
      for (let at = first + from; at < first + to; at++) if (own.has(sample) || kinds[at] !== TRAINED) kinds[at] = own.has(sample) ? TRAINED : ELSEWHERE;
    }
  }
  return {
    ids, kinds, at: (index) => describe(view, view.segments[places[index]], index, kinds[index], own, ids[index]),
    values: (name) => valuesOf(name, view, timeline, own, ids.length),
  };
}

// Values of the tokens of a timeline by name (see colours.js); NaN for a token without one.
function valuesOf(name, view, timeline, own, length) {
  const values = new Float64Array(length).fill(NaN);
  if (name === "ratio") {
    const sampled = valuesOf("logprob", view, timeline, own, length), current = valuesOf("current", view, timeline, own, length);
    return values.map((_, index) => Math.exp(current[index] - sampled[index]));
  }
  for (const number of timeline.segments) {
    const segment = view.segments[number];
    if (name === "logprob" || name === "staleness") {
      for (const run of segment.sampled) {
        const behind = stalenessOf(view, view.calls[run.call]);
        run.logprobs.forEach((logprob, place) => { values[segment.start + run.from + place] = name === "logprob" ? logprob : behind; });
      }
      continue;
    }
    // Runs of the timeline's own samples come last, as they count if other samples train the same tokens.
    const runs = segment.trained.filter(({ mask }) => mask).sort((left, right) => own.has(left.sample) - own.has(right.sample));
    for (const run of runs) {
      for (let place = run.from; place < run.to; place++) {
        const value = trainedValue(name, view, run, place - run.from);
        if (value !== null && value !== undefined) values[segment.start + place] = value;
      }
    }
  }
  return values;
}

function trainedValue(name, view, run, place) {
  if (name === "advantage") return run.advantage ?? view.advantage;
  return (name === "current" ? run.logprobs : run.entropies)?.[place];
}

// Steps by which the weights of a call were behind. The update of step s changes the weights of version s - 1;
// the validation at step s measures those of version s.
export const stalenessOf = (view, call) => Math.max(0, (view.split === "val" ? view.step : view.step - 1) - call.policy_version);

function describe(view, segment, index, kind, own, id) {
  const place = index - segment.start;
  const sampled = segment.sampled.filter((run) => place >= run.from && place < run.from + run.logprobs.length)
    .map((run) => ({ call: run.call, logprob: run.logprobs[place - run.from] }));
  const trained = segment.trained.filter(({ from, to, mask }) => mask && place >= from && place < to);
  const trainedHere = trained.filter(({ sample }) => own.has(sample));
  return {
    index, id, kind, sampled,
    mask: trainedHere.reduce((sum, { mask }) => sum + mask, 0),
    updates: trainedHere.map(({ advantage, logprobs, entropies, from }) => (
      { advantage, logprob: logprobs?.[place - from] ?? null, entropy: entropies?.[place - from] ?? null })),
    elsewhere: trained.filter(({ sample }) => !own.has(sample)).map(({ sample }) => sample + 1),
    staleness: sampled.length ? stalenessOf(view, view.calls[sampled[0].call]) : null,
    versions: [...new Set(sampled.map(({ call }) => view.calls[call].policy_version))],
  };
}
