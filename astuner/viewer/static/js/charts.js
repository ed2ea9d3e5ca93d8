// Interactive charts: drag to zoom, double-click to reset. The charts of a page share their cursor.

import uPlot from "../vendor/uplot.js";
import { h, real } from "./dom.js";

const LIGHT = ["#2f62c9", "#c2571a", "#18794e", "#8e3fb5", "#a3851b", "#c22f5e", "#287f8f"];
const DARK = ["#7fa8ff", "#ffa06b", "#6fd3a0", "#cf93f0", "#e6c95c", "#ff8fb0", "#70cfe0"];
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
const BORDERS = ["solid", "dashed", "dotted", "double"];

export const isDark = () => document.documentElement.dataset.theme === "dark";

// lines: [{label, color, dash, points: [[x, y], …]}]
export function chart(title, lines, { seconds = false, smooth = 0 } = {}) {
  const box = h("section", { class: "card chart" }, h("h3", {}, title));
  const style = getComputedStyle(document.documentElement);
  const border = (line) => BORDERS[line.dash % BORDERS.length];
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 },
    ticks: { stroke: style.getPropertyValue("--line"), width: 1 }, font: "11px system-ui" };
  const options = {
    width: 360, height: 190,
    cursor: { sync: { key: "run" } },
    scales: { x: { time: false } },
    series: [{ label: seconds ? "s" : "step" }, ...lines.map((line) => ({
      label: line.label, stroke: colour(line.color), dash: DASHES[line.dash % DASHES.length],
      width: 1.6, spanGaps: true, points: { size: 4 }, value: (_, value) => real(value, 4) }))],
    legend: { markers: { width: 3, dash: (_, index) => border(lines[index - 1]) } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: roomFor, values: (_, ticks) => ticks.map((tick) => real(tick, 4)) }],
  };
  let plot = null;
  let data = joined(lines, smooth);
  new ResizeObserver(([entry]) => {
    const width = Math.max(220, Math.floor(entry.contentRect.width));
    if (plot === null) plot = new uPlot({ ...options, width }, data, box);
    else if (plot.width !== width) plot.setSize({ width, height: options.height });
  }).observe(box);
  const update = (fresh) => {
    const zoomed = plot !== null && data[0].length && (plot.scales.x.min > data[0][0] || plot.scales.x.max < data[0].at(-1));
    data = joined(fresh, smooth);
    plot?.setData(data, !zoomed);
    if (zoomed) plot.redraw();
  };
  return { box, update };
}

// Width of an axis, from its longest label.
function roomFor(_, labels) {
  return Math.max(40, 16 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

function colour(number) {
  const known = isDark() ? DARK : LIGHT;
  // Further lines have hues that differ by the golden angle.
  return known[number] ?? `hsl(${Math.round((number * 137.5) % 360)} 60% ${isDark() ? 72 : 40}%)`;
}

function joined(lines, smooth) {
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...lines.map((line) => {
    const ys = new Array(xs.length).fill(null);
    for (const [x, y] of line.points) ys[place.get(x)] = y;
    return smooth ? smoothed(ys, smooth) : ys;
  })];
}

function smoothed(ys, weight) {
  let mean = null;
  return ys.map((y) => {
    if (y === null) return null;
    mean = mean === null ? y : weight * mean + (1 - weight) * y;
    return mean;
  });
}
