// Interactive charts: drag to zoom, double-click to reset, arrow keys to read values. Charts share their cursor.

import uPlot from "../vendor/uplot.js";
import { brief, count, h, real } from "./dom.js";

const LIGHT = ["#2f62c9", "#c2571a", "#18794e", "#8e3fb5", "#8a6d00", "#c22f5e", "#1f7482"];
const DARK = ["#7fa8ff", "#ffa06b", "#6fd3a0", "#cf93f0", "#e6c95c", "#ff8fb0", "#70cfe0"];
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
const BORDERS = ["solid", "dashed", "dotted", "double"];
// Cividis: Nuñez, Anderton and Renslow (2018). It is ordered by lightness and looks alike with colour-vision deficiencies.
const SHADES = ["#00224e", "#083370", "#35456c", "#4f576c", "#666970", "#7d7c78", "#948e77", "#aea371", "#c8b866", "#e5cf52", "#fee838"];
const HEIGHT = 190, SYNC = "run";

export const isDark = () => document.documentElement.dataset.theme === "dark";

// Level of a share from 0 to 1 on the scale of a heat map, 0 to 10.
export const level = (share) => Math.max(0, Math.min(SHADES.length - 1, Math.round(share * (SHADES.length - 1))));

export function colour(number) {
  const known = isDark() ? DARK : LIGHT;
  // Further lines have hues that differ by the golden angle.
  return known[number] ?? `hsl(${Math.round((number * 137.5) % 360)} 60% ${isDark() ? 72 : 36}%)`;
}

export function swatch(number, dash = 0, markers = false) {
  const sign = h("i", { class: markers ? "swatch dot" : "swatch" });
  sign.style.borderColor = colour(number);
  sign.style.borderTopStyle = BORDERS[dash % BORDERS.length];
  return sign;
}

// lines: [{label, color, dash, markers, points: [[x, y, step], …], intervals: Map from x to [low, high],
//   band: {label, low: [[x, y, step], …], high: […]}}]
// options: seconds, whether x is a time; smooth, 0 to 0.95; log, whether y is logarithmic; onLog(log), called at a click;
//   legend, whether the lines can be switched off here; hidden, numbers of lines that are switched off.
export function chart(title, lines, { seconds = false, smooth = 0, log = false, onLog = null, legend = true, hidden = new Set(), tools = [] } = {}) {
  let drawn = spread(lines);
  let data = table(drawn, smooth, log);
  const flat = () => data.slice(1).every((ys) => ys.every((y) => !y));
  const off = h("span", { class: "soft" });
  const toggle = onLog && h("button", { type: "button", class: "small", "aria-pressed": log, "aria-label": `log axis: ${title}`,
    title: "logarithmic axis", onclick: () => onLog(!log) }, "log");
  const box = h("section", { class: "card chart", "aria-label": title }, h("div", { class: "chart-head" }, h("h3", {}, title), off, tools, toggle));
  const values = h("div", { class: "chart-legend" });
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 },
    ticks: { stroke: style.getPropertyValue("--line"), width: 1 }, font: "11px system-ui" };
  const options = {
    width: 360, height: HEIGHT, legend: { show: false },
    cursor: { sync: { key: SYNC } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => linear(...around(drawn, low, high)) } },
    series: [{}, ...drawn.map((line) => series(line, hidden))],
    bands: drawn.flatMap((line, place) => (line.part === "high" ? [{ series: [place + 1, place], fill: faded(line.color) }] : [])),
    axes: [{ ...axis, size: 30 }, { ...axis, size: roomFor, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : real(tick, 4))) }],
    hooks: { draw: [(plot) => intervals(plot, drawn)], setCursor: [() => show()] },
  };
  let plot = null;
  const switched = (line) => {
    for (const [place, other] of drawn.entries()) {
      if (other.of === line.of) { other.shown = !line.shown; plot?.setSeries(place + 1, { show: other.shown }, true, false); }
    }
  };
  const show = () => {
    const at = plot?.cursor.idx ?? null;
    values.replaceChildren(...readout(drawn, data, at, seconds, legend && switched));
  };
  const note = () => {
    const lost = log ? drawn.reduce((sum, line) => sum + line.points.filter(([, y]) => y !== null && y <= 0).length, 0) : 0;
    off.textContent = lost ? `${count(lost)} values ≤ 0 are not shown` : data[0].length && flat() ? "all values are 0" : "";
    if (toggle) toggle.disabled = !log && !drawn.some((line) => line.points.some(([, y]) => y > 0));
    plot?.over.setAttribute("aria-label", summary(title, drawn, seconds));
  };
  box.append(values);
  fit(box, (width) => {
    if (plot === null) {
      plot = new uPlot({ ...options, width }, data, (self, ready) => { values.before(self.root); ready(); });
      plot.over.setAttribute("role", "img");
      readable(plot, () => data[0], () => `${summary(title, drawn, seconds)} ${values.textContent}`);
      note();
    } else if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
  });
  show();
  note();
  const update = (fresh) => {
    const zoomed = plot !== null && data[0].length && (plot.scales.x.min > data[0][0] || plot.scales.x.max < data[0].at(-1));
    drawn = spread(fresh).map((line, place) => ({ ...line, shown: drawn[place]?.shown ?? true }));
    data = table(drawn, smooth, log);
    plot?.setData(data, !zoomed);
    if (zoomed) plot.redraw();
    show();
    note();
  };
  return { box, update };
}

// Number of episodes by step and reward.
// rewards: as the server sends them; xOf(step): place of a step on the x axis, null if it is unknown.
export function histogram(title, rewards, xOf, { seconds = false } = {}) {
  const box = h("section", { class: "card chart", "aria-label": title }, h("div", { class: "chart-head" }, h("h3", {}, title)));
  const values = h("div", { class: "chart-legend" });
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { show: false }, ticks: { stroke: style.getPropertyValue("--line"), width: 1 },
    font: "11px system-ui" };
  const width = (all) => (all.high - all.low) / all.bins || 1;
  const shape = (all) => {
    const steps = all.steps.map((step) => ({ ...step, x: xOf(step.step) })).filter((step) => step.x !== null).sort((a, b) => a.x - b.x);
    const gaps = steps.slice(1).map((step, place) => step.x - steps[place].x).filter((gap) => gap > 0).sort((a, b) => a - b);
    return { all, steps, gap: gaps[Math.floor(gaps.length / 2)] ?? 1 };
  };
  let state = shape(rewards);
  const data = () => [state.steps.map((step) => step.x), state.steps.map((step) => step.mean)];
  const draw = (plot) => {
    const { ctx } = plot;
    const { all, steps, gap } = state;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    for (const step of steps) {
      const left = plot.valToPos(step.x - gap / 2, "x", true), right = plot.valToPos(step.x + gap / 2, "x", true);
      for (const [bin, episodes] of step.histogram) {
        const low = all.low + bin * width(all);
        const bottom = plot.valToPos(low, "y", true), top = plot.valToPos(low + width(all), "y", true);
        ctx.fillStyle = SHADES[level(episodes / step.episodes)];
        ctx.fillRect(left, top, Math.max(1, right - left - (right - left > 4 ? 1 : 0)), bottom - top);
      }
    }
    ctx.restore();
  };
  let plot = null;
  const show = () => {
    const at = plot?.cursor.idx;
    const step = at === null || at === undefined ? null : state.steps[at];
    if (!step) { values.replaceChildren(...scale("share of the step's episodes")); return; }
    const reward = plot.posToVal(plot.cursor.top, "y");
    const bin = Math.max(0, Math.min(state.all.bins - 1, Math.floor((reward - state.all.low) / width(state.all))));
    const low = state.all.low + bin * width(state.all);
    const number = step.histogram.find(([place]) => place === bin)?.[1] ?? 0;
    values.replaceChildren(h("span", {}, `step ${step.step}: ${count(number)} of ${count(step.episodes)} episodes with a reward of ${real(low, 2)} to ${real(low + width(state.all), 2)}`));
  };
  const about = () => {
    const [first, last] = [state.steps[0], state.steps.at(-1)];
    return `${title}. ` + (first ? `Median ${real(first.median)} at step ${first.step}, ${real(last.median)} at step ${last.step}.` : "No rewards.");
  };
  box.append(values);
  fit(box, (pixels) => {
    if (plot === null) {
      plot = new uPlot({ width: pixels, height: HEIGHT, legend: { show: false }, cursor: { sync: { key: SYNC } },
        scales: { x: { time: false, range: (_, low, high) => [low - state.gap / 2, high + state.gap / 2] },
          y: { range: () => [state.all.low ?? 0, (state.all.low ?? 0) + state.all.bins * width(state.all)] } },
        series: [{}, { points: { show: false }, paths: () => null }],
        axes: [{ ...axis, size: 30 }, { ...axis, size: roomFor, values: (_, ticks) => ticks.map((tick) => real(tick, 4)) }],
        hooks: { drawClear: [draw], setCursor: [show] } }, data(), (self, ready) => { values.before(self.root); ready(); });
      plot.over.setAttribute("role", "img");
      plot.over.setAttribute("aria-label", about());
      readable(plot, () => data()[0], () => `${about()} ${values.textContent}`);
    } else if (plot.width !== pixels) plot.setSize({ width: pixels, height: HEIGHT });
  });
  show();
  box.append(statistics(() => state.steps, seconds));
  const update = (fresh) => { state = shape(fresh); plot?.setData(data()); plot?.over.setAttribute("aria-label", about()); show(); };
  return { box, update };
}

// The colours of a heat map from 0 to 1.
export function scale(label) {
  return [h("span", {}, label), h("span", { class: "soft" }, "0"), h("span", { class: "scale", "aria-hidden": "true" },
    SHADES.map((_, number) => h("i", { class: `v${number}` }))), h("span", { class: "soft" }, "100 %")];
}

// The values of the histogram as a table, made when it is opened.
function statistics(steps, seconds) {
  const details = h("details", { class: "small" }, h("summary", {}, "as a table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const names = ["step", "episodes", "lowest", "10 %", "median", "mean", "90 %", "highest"];
    const keys = ["step", "episodes", "least", "q10", "median", "mean", "q90", "most"];
    details.append(h("div", { class: "scroll low", tabindex: 0, role: "region", "aria-label": "rewards by step" }, h("table", { class: "list" },
      h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, steps().map((step) => h("tr", {}, keys.map((key) => h("td", {}, real(step[key])))))))));
  });
  return details;
}

// The lines with the limits of their bands as lines of their own.
function spread(lines) {
  return lines.flatMap((line, of) => {
    const own = { ...line, of, part: "line", shown: true };
    if (!line.band) return [own];
    const limit = (part, points) => ({ ...line, of, part, points, markers: false, intervals: null, shown: true });
    return [own, limit("low", line.band.low), limit("high", line.band.high)];
  });
}

function series(line, hidden) {
  const stroke = colour(line.color);
  line.shown = !hidden.has(line.of);
  if (line.part !== "line") return { show: line.shown, stroke: "transparent", width: 0, points: { show: false } };
  const points = line.markers ? { show: true, size: 7, fill: stroke, stroke } : { size: 4 };
  return { show: line.shown, stroke, dash: DASHES[line.dash % DASHES.length], width: 1.6, points, ...(line.markers ? { paths: () => null } : {}) };
}

// Columns for uPlot. A place where only other lines have a value is undefined, and the line passes it. A step at which a
// line should have a value and has none is null, and the line has a gap.
function table(lines, smooth, log) {
  const prepared = lines.map((line) => {
    const points = line.markers ? line.points : withGaps(line.points);
    return line.part === "line" && !line.markers && smooth ? smoothed(points, smooth) : points;
  });
  const limits = lines.flatMap((line) => [...(line.intervals?.keys() ?? [])]);
  const xs = [...new Set([...prepared.flatMap((points) => points.map(([x]) => x)), ...limits])].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...prepared.map((points) => {
    const ys = new Array(xs.length).fill(undefined);
    for (const [x, y] of points) ys[place.get(x)] = y === null || (log && y <= 0) ? null : y;
    return ys;
  })];
}

// The points with a value of null between two that are further apart than usual.
function withGaps(points) {
  const distances = points.slice(1).map((point, place) => point[2] - points[place][2]).filter((distance) => distance > 0).sort((a, b) => a - b);
  const usual = distances[Math.floor(distances.length / 2)] ?? 1;
  return points.flatMap((point, place) => {
    const before = points[place - 1];
    return before && point[2] - before[2] > usual ? [[(before[0] + point[0]) / 2, null, null], point] : [point];
  });
}

function smoothed(points, weight) {
  let mean = null;
  return points.map(([x, y, step]) => {
    if (y === null) return [x, null, step];
    mean = mean === null ? y : weight * mean + (1 - weight) * y;
    return [x, mean, step];
  });
}

// Range of a linear axis. Equal values get a range around them, and zeros the range 0 to 1.
function linear(low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

// The range of the values and of the intervals that are shown.
function around(lines, low, high) {
  const limits = lines.filter((line) => line.shown && line.intervals).flatMap((line) => [...line.intervals.values()].flat());
  return [[low, ...limits], [high, ...limits]].map((values, place) => {
    const known = values.filter((value) => typeof value === "number");
    return known.length ? Math[place ? "max" : "min"](...known) : null;
  });
}

// Vertical bars from the low to the high end of intervals.
function intervals(plot, lines) {
  const { ctx } = plot;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const line of lines) {
    if (!line.intervals || !line.shown || line.part !== "line") continue;
    ctx.strokeStyle = colour(line.color);
    const cap = 3 * devicePixelRatio;
    for (const [x, [low, high]] of line.intervals) {
      const at = plot.valToPos(x, "x", true);
      if (at < plot.bbox.left - 1 || at > plot.bbox.left + plot.bbox.width + 1) continue;
      const inside = (y) => Math.max(plot.bbox.top, Math.min(plot.bbox.top + plot.bbox.height, plot.valToPos(y, "y", true)));
      const [bottom, top] = [inside(Math.max(low, plot.scales.y.distr === 3 ? plot.scales.y.min : low)), inside(high)];
      ctx.beginPath();
      ctx.moveTo(at, bottom); ctx.lineTo(at, top);
      ctx.moveTo(at - cap, top); ctx.lineTo(at + cap, top);
      ctx.moveTo(at - cap, bottom); ctx.lineTo(at + cap, bottom);
      ctx.stroke();
    }
  }
  ctx.restore();
}

// The values at the cursor; without a cursor, the last ones. With `switched`, each line has a button that hides it.
function readout(lines, data, at, seconds, switched) {
  const x = at === null ? null : data[0][at];
  const value = (line) => {
    const place = lines.indexOf(line);
    if (at !== null) return data[place + 1][at];
    return data[place + 1].findLast((y) => y !== null && y !== undefined);
  };
  const entries = lines.filter((line) => line.part === "line").map((line) => {
    const y = value(line);
    const limits = x === null ? null : line.intervals?.get(x);
    const [low, high] = ["low", "high"].map((part) => { const found = lines.find((other) => other.of === line.of && other.part === part); return found && value(found); });
    const text = `${real(y, 4)}${limits ? ` (${real(limits[0])} to ${real(limits[1])})` : ""}${typeof low === "number" && typeof high === "number" ? ` (${line.band.label} ${real(low)} to ${real(high)})` : ""}`;
    const content = [swatch(line.color, line.dash, line.markers), h("span", { class: "label" }, line.label), " ", h("b", { class: "value" }, text)];
    if (!switched) return h("span", {}, content);
    return h("button", { type: "button", class: "small", "aria-pressed": line.shown,
      onclick: (event) => { switched(line); event.currentTarget.setAttribute("aria-pressed", line.shown); } }, content);
  });
  return [h("span", {}, seconds ? "s " : "step ", h("b", { class: "value" }, x === null ? "last" : real(x, 1))), ...entries];
}

function summary(title, lines, seconds) {
  const texts = lines.filter((line) => line.part === "line" && line.points.length).map((line) => {
    const known = line.points.filter(([, y]) => y !== null);
    return known.length ? `${line.label}: ${real(known[0][1])} at ${seconds ? "second" : "step"} ${real(known[0][0], 0)}, ${real(known.at(-1)[1])} at ${real(known.at(-1)[0], 0)}` : line.label;
  });
  return `Chart ${brief(title, 60)}. ${texts.join("; ")}.`;
}

// The left and right arrow keys move the cursor of a chart that has the focus.
function readable(plot, xs, text) {
  plot.over.tabIndex = 0;
  plot.over.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    event.stopPropagation();
    const forward = event.key === "ArrowRight";
    const at = plot.cursor.idx ?? (forward ? -1 : xs().length);
    const next = Math.max(0, Math.min(xs().length - 1, at + (forward ? 1 : -1)));
    plot.setCursor({ left: plot.valToPos(xs()[next], "x"), top: plot.bbox.height / devicePixelRatio / 2 });
    plot.over.setAttribute("aria-label", text());
  });
}

// Call draw(width) when the width of a box is known and whenever it changes.
function fit(box, draw) {
  new ResizeObserver(([entry]) => draw(Math.max(220, Math.floor(entry.contentRect.width)))).observe(box);
}

// Width of an axis, from its longest label.
function roomFor(_, labels) {
  return Math.max(40, 16 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

function faded(number) {
  const full = colour(number);
  return full.startsWith("#") ? `${full}30` : full.replace(")", " / 19%)");
}
