// The token view. Only visible lines are in the document, so that 100,000 tokens scroll smoothly.

import { characterName, count, h, isInvisible, real } from "./dom.js";
import { COLOURS, NO_VALUE, scaleOf, summaryOf } from "./colours.js";
import { kindNames, readTimeline } from "./timeline.js";

const LINE = 22, LONGEST = 60, AROUND = 12;

// Text of a token with invisible characters made visible.
export function visible(text, limit = LONGEST) {
  let shown = "";
  for (const character of text.slice(0, limit)) {
    if (character === " ") shown += "·";
    else if (character === "\n") shown += "⏎";
    else if (character === "\t") shown += "→";
    else shown += isInvisible(character) ? `⟨${characterName(character)}⟩` : character;
  }
  return text.length > limit ? `${shown}…` : shown;
}

// Combining marks have no width; East Asian characters and emoji are two columns wide.
function columns(text) {
  let total = 0;
  for (const character of text) {
    const code = character.codePointAt(0);
    total += /\p{M}/u.test(character) ? 0 : code >= 0x1100 && (code <= 0x115f || code >= 0x2e80) ? 2 : 1;
  }
  return total;
}

// chosen: index of the selected token or null; colour: a key of COLOURS. choose(token) and paint(colour) report changes.
export function tokenView(view, timelineNumber, chosen, choose, colour, paint) {
  const timeline = readTimeline(view, timelineNumber);
  const box = h("div", { class: "tokens", tabindex: 0, role: "application", "aria-label": "tokens; the left and right arrow keys move" });
  const room = h("div");
  const tip = h("div", { class: "tip", role: "tooltip", hidden: true });
  const texts = new Map();
  const text = (id) => {
    if (!texts.has(id)) texts.set(id, view.has_texts && view.vocabulary[id] !== undefined ? visible(view.vocabulary[id]) || "∅" : `${id} `);
    return texts.get(id);
  };
  box.append(room);
  const state = { lines: [], at: chosen, width: 0, drawn: new Map(), classOf: null };
  const legendBox = h("div");
  const colourBy = (name) => {
    const colouring = coloured(name, view, timeline);
    state.classOf = colouring.classOf;
    legendBox.replaceChildren(...colouring.legend);
  };
  colourBy(colour);
  const draw = () => drawLines(box, room, state, timeline, text);
  new ResizeObserver(() => {
    const fits = Math.max(16, Math.floor((box.clientWidth - 24) / charWidth(box)));
    if (fits === state.width) return;
    room.replaceChildren();
    Object.assign(state, { width: fits, lines: broken(timeline.ids, text, view, fits), drawn: new Map() });
    room.style.height = `${state.lines.length * LINE + 8}px`;
    box.style.height = `min(46vh, ${state.lines.length * LINE + 12}px)`;
    if (state.at !== null) box.scrollTop = Math.max(0, (lineOf(state) - 3) * LINE);
    draw();
  }).observe(box);
  const show = (element) => point(tip, element, view, timeline.at(Number(element.dataset.at)));
  const follow = () => {
    draw();
    const shown = room.querySelector(".t:hover") ?? (document.activeElement === box ? room.querySelector(".at") : null);
    if (shown && !tip.hidden) show(shown); else tip.hidden = true;
  };
  box.addEventListener("scroll", () => requestAnimationFrame(follow), { passive: true });
  box.addEventListener("pointerover", (event) => { if (event.target.dataset.at) show(event.target); else tip.hidden = true; });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
  const select = (at) => {
    state.at = at;
    choose(at);
    const top = lineOf(state) * LINE;
    if (top < box.scrollTop || top + LINE > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
    draw();
    const element = room.querySelector(".at");
    if (element) show(element);
  };
  box.addEventListener("click", (event) => { if (event.target.dataset.at) select(Number(event.target.dataset.at)); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    select(Math.min(timeline.ids.length - 1, Math.max(0, (state.at ?? -1) + move)));
  });
  const repaint = (name) => {
    colourBy(name);
    room.replaceChildren();
    state.drawn = new Map();
    draw();
    paint(name);
  };
  return { content: [colourChoice(view, timeline, colour, repaint), legendBox, box, tip] };
}

function charWidth(box) {
  const probe = h("span", { class: "line" }, "0".repeat(50));
  probe.style.right = "auto";
  box.append(probe);
  const width = probe.getBoundingClientRect().width / 50;
  probe.remove();
  return width;
}

// First token of each line. Lines end at newlines and at the width of the view.
function broken(ids, text, view, fits) {
  const lines = [0], widths = new Map();
  let used = 0;
  ids.forEach((id, index) => {
    if (!widths.has(id)) widths.set(id, columns(text(id)));
    const own = widths.get(id);
    if (used && used + own > fits) { lines.push(index); used = 0; }
    used += own;
    if (view.vocabulary[id]?.endsWith("\n") && index + 1 < ids.length) { lines.push(index + 1); used = 0; }
  });
  return lines;
}

function lineOf({ lines, at }) {
  let low = 0, high = lines.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (lines[middle] <= at) low = middle; else high = middle - 1;
  }
  return low;
}

// Lines that stay visible are kept; only new lines are created.
function drawLines(box, room, { lines, at, drawn, classOf }, timeline, text) {
  const first = Math.max(0, Math.floor(box.scrollTop / LINE) - AROUND);
  const last = Math.min(lines.length, Math.ceil((box.scrollTop + box.clientHeight) / LINE) + AROUND);
  for (const [number, line] of drawn) {
    if (number < first || number >= last) { line.remove(); drawn.delete(number); }
  }
  for (let number = first; number < last; number++) {
    if (drawn.has(number)) continue;
    const line = h("div", { class: "line" });
    line.style.top = `${number * LINE + 4}px`;
    const end = lines[number + 1] ?? timeline.ids.length;
    for (let index = lines[number]; index < end; index++) {
      const token = document.createElement("span");
      token.className = `t ${classOf(index)}`;
      token.dataset.at = index;
      token.textContent = text(timeline.ids[index]);
      line.append(token);
    }
    drawn.set(number, line);
    room.append(line);
  }
  room.querySelector(".at")?.classList.remove("at");
  room.querySelector(`[data-at="${at}"]`)?.classList.add("at");
}

function point(tip, element, view, token) {
  const rows = [
    ["token", `${count(token.index)}`], ["id", String(token.id)],
    ["text", view.has_texts ? visible(view.vocabulary[token.id] ?? "", 200) : "tokenizer not available"],
    ["kind", kindNames(view)[token.kind]], ["mask", String(token.mask)],
    ...token.sampled.map(({ call, logprob }) => [`logprob, call ${call + 1}`, probability(logprob)]),
    ...token.updates.flatMap(({ advantage, logprob }) => [["current logprob", current(advantage, logprob, token.sampled)],
      ["advantage", real(advantage ?? view.advantage, 4)]]),
    ["policy version", token.versions.join(", ") || "–"],
  ];
  const entropies = token.updates.map(({ entropy }) => entropy).filter((entropy) => entropy !== null);
  if (entropies.length) rows.push(["entropy", entropies.map((entropy) => real(entropy, 4)).join(", ")]);
  if (token.staleness !== null) rows.push(["staleness", count(token.staleness)]);
  if (token.elsewhere.length) rows.push(["trained in", `sample ${token.elsewhere.join(", ")}`]);
  tip.replaceChildren(h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  tip.hidden = false;
  const place = element.getBoundingClientRect();
  const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(6, place.top - tip.offsetHeight - 6)}px`;
}

const probability = (logprob) => `${real(logprob, 4)} (p ${real(Math.exp(logprob), 4)})`;

// The trainer's logprob, and its difference from the sampled logprob if there is exactly one.
function current(advantage, logprob, sampled) {
  if (logprob === null) return advantage === 0 ? "not computed: no advantage" : "not recorded";
  const difference = sampled.length === 1 ? logprob - sampled[0].logprob : 0;
  return `${probability(logprob)}${difference ? `, ${difference > 0 ? "+" : ""}${real(difference, 4)}` : ""}`;
}

function colourChoice(view, timeline, chosen, repaint) {
  const names = Object.keys(COLOURS);
  const known = new Map(names.map((name) => [name, name === "kind" || timeline.values(name).some((value) => !Number.isNaN(value))]));
  const options = names.map((name) => h("option", { value: name, selected: name === chosen, disabled: !known.get(name) && name !== chosen },
    COLOURS[name][0] + (known.get(name) ? "" : " (not in this timeline)")));
  return h("label", { class: "colour-by" }, "colour by", h("select", { name: "colour", onchange: (event) => repaint(event.target.value) }, options));
}

// Returns classOf(index), the class of a token, and the elements of the legend.
function coloured(name, view, timeline) {
  if (name === "kind") return { classOf: (index) => `k${timeline.kinds[index]}`, legend: [kindLegend(view, timeline)] };
  const [title, meaning, source] = COLOURS[name];
  const values = timeline.values(name), scale = scaleOf(name, values.filter((value) => !Number.isNaN(value)));
  const bins = [...values].map((value) => (Number.isNaN(value) ? null : scale.bin(value)));
  const totals = scale.bins.map(() => 0);
  for (const bin of bins) if (bin !== null) totals[bin]++;
  const without = bins.filter((bin) => bin === null).length;
  const swatches = scale.bins.map(([kind, label], bin) => h("span", {}, h("i", { class: kind }), `${label}: ${count(totals[bin])}`));
  const summary = summaryOf(values);
  return {
    classOf: (index) => (bins[index] === null ? NO_VALUE : scale.bins[bins[index]][0]),
    legend: [h("div", { class: "legend", "data-colour": name }, swatches, h("span", {}, h("i", { class: NO_VALUE }), `no value: ${count(without)}`)),
      h("p", { class: "soft meaning" }, summary ? `${title}: ${meaning}. ${summary}.` : `${title}: no values here; ${source}.`)],
  };
}

function kindLegend(view, { kinds }) {
  const totals = [0, 0, 0, 0, 0];
  for (const kind of kinds) totals[kind]++;
  return h("div", { class: "legend" }, kindNames(view).map((name, kind) => h("span", {}, h("i", { class: `k${kind}` }), `${name} ${count(totals[kind])}`)));
}
