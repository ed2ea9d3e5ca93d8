// The trie of an episode's calls: a bar per segment of tokens, a line per fork. A click opens the timeline.

import { brief, count, svg } from "./dom.js";
import { agentsOfTimeline } from "./timeline.js";

const ROW = 34, GAP = 26;
export const MAX_TIMELINES = 400;
const width = (tokens) => 24 + 34 * Math.log2(1 + tokens / 8);

export function tree(view, chosen, open) {
  const shown = view.timelines.slice(0, MAX_TIMELINES);
  const places = layout(view, shown);
  const on = new Set(view.timelines[chosen]?.segments);
  const forks = forksBySegment(view);
  const right = Math.max(200, ...[...places.values()].map((place) => place.x + place.width));
  const box = svg("svg", { width: right + 230, height: shown.length * ROW + 20, role: "group", "aria-label": "timelines" });
  for (const [number, place] of places) {
    const segment = view.segments[number];
    const before = places.get(segment.parent);
    if (before) {
      const from = before.x + before.width;
      box.append(svg("path", { class: "edge", d: `M${from},${before.y + 7} C${from + 13},${before.y + 7} ${place.x - 13},${place.y + 7} ${place.x},${place.y + 7}` }));
    }
    box.append(bar(view, number, place, on.has(number), () => open(place.timeline)));
    const fork = forks.get(number);
    if (fork) box.append(svg("text", { class: "cause", x: place.x, y: place.y - 3 }, brief(fork.map((one) => one.cause).join(", "), 60)));
  }
  shown.forEach((timeline, index) => {
    const place = places.get(timeline.segments.at(-1));
    box.append(svg("text", { x: place.x + place.width + 6, y: place.y + 11 }, `${index + 1} ${brief(agentsOfTimeline(timeline), 40)} · ${count(timeline.tokens)} tokens`));
  });
  return box;
}

export function forksBySegment(view) {
  const found = new Map();
  for (const call of view.calls) {
    if (!call.fork) continue;
    const at = call.path.find((number) => {
      const segment = view.segments[number];
      return call.fork.position < segment.start + segment.ids.length;
    }) ?? call.path.at(-1);
    if (at !== undefined) found.set(at, [...(found.get(at) ?? []), call.fork]);
  }
  return found;
}

function layout(view, timelines) {
  const places = new Map();
  timelines.forEach((timeline, row) => {
    let x = 8;
    for (const number of timeline.segments) {
      const own = width(view.segments[number].ids.length);
      if (!places.has(number)) places.set(number, { x, y: row * ROW + 18, width: own, timeline: row });
      x += own + GAP;
    }
  });
  return places;
}

function bar(view, number, place, on, open) {
  const segment = view.segments[number];
  const scale = place.width / segment.ids.length;
  const run = (from, to, kind) => svg("rect", { class: kind, x: place.x + from * scale, y: place.y, width: Math.max(1, (to - from) * scale), height: 14 });
  const label = `${count(segment.ids.length)} tokens from ${count(segment.start)}`;
  return svg("g", { class: `seg${on ? " on" : ""}`, tabindex: 0, role: "button", "aria-label": `timeline ${place.timeline + 1}: ${label}`, onclick: open,
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } } },
  svg("title", {}, label), svg("rect", { class: "base", x: place.x, y: place.y, width: place.width, height: 14, rx: 4 }),
  ...segment.sampled.slice(0, 200).map((one) => run(one.from, one.from + one.logprobs.length, "said-run not")),
  ...segment.trained.filter(({ mask }) => mask).slice(0, 200).map(({ from, to }) => run(from, to, "said-run")));
}
