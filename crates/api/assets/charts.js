// Charts. Each has numbers with their unit at its y axis and a text alternative for screen readers; the tables contain the exact values.
//
// Positions are percentages and no plot is scaled, so that lines and letters have the same size on every screen.

import { el, plainText, svg } from "./dom.js";
import { formatMeasurement, formatTimestamp, plural, unitName } from "./format.js";

const percent = (fraction) => `${Number((100 * fraction).toFixed(3))}%`;

// The scale of an axis: round numbers that include `low` and `high`. `at` returns the position of a value, from 0 to 1.
export function niceScale(low, high, { steps = 3, integer = false } = {}) {
  let [from, to] = [low, high];
  if (to <= from) {
    const margin = Math.abs(from) / 100 || 1;
    [from, to] = [from >= 0 ? Math.max(0, from - margin) : from - margin, to + margin];
  }
  const raw = (to - from) / steps;
  const power = 10 ** Math.floor(Math.log10(raw));
  const factor = [1, 2, 2.5, 5, 10].find((candidate) => candidate * power >= raw * 0.999);
  const step = integer ? Math.max(1, Math.ceil(factor * power)) : factor * power;
  const [first, last] = [Math.floor(from / step + 1e-9), Math.ceil(to / step - 1e-9)];
  const ticks = Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
  const range = (last - first) * step;
  // As many digits as distinguish one tick from the next.
  const digits = Math.max(4, Math.ceil(Math.log10(Math.max(Math.abs(first), Math.abs(last)))) + 2);
  return { ticks, digits, at: (value) => (value - first * step) / range };
}

// A plot with the numbers of its y axis, and labels below. `ticks`: [position from the bottom, text]; `title`: what the y axis counts.
function chart({ label, name = "", title, note, ticks }, below, ...content) {
  const line = ([at]) => svg("line", { class: "grid", x1: 0, x2: "100%", y1: percent(1 - at), y2: percent(1 - at) });
  return el(
    "figure",
    { class: `chart ${name}` },
    title && el("div", { class: "y-title" }, el("span", {}, title), note && el("span", {}, note)),
    el("div", { class: "y-axis", "aria-hidden": "true" }, ...ticks.map(([at, text]) => el("span", { style: { bottom: percent(at) } }, text))),
    svg("svg", { class: `plot ${name}`, role: "img", "aria-label": label }, ...ticks.map(line), ...content),
    below && el("figcaption", { class: "axis-labels" }, ...below),
  );
}

const valueTicks = (scale, unit) => scale.ticks.map((tick) => [scale.at(tick), formatMeasurement(tick, unit, scale.digits)]);

// The distribution of a measurement over the fleet. `nodeValue` highlights the value of one node.
export function histogram({ min, max, median, p5, p95, bars, nodes }, unit, nodeValue = null) {
  const format = (value) => formatMeasurement(value, unit);
  const hasNodeValue = nodeValue !== null && nodeValue !== undefined;
  const [low, high] = hasNodeValue ? [Math.min(min, nodeValue), Math.max(max, nodeValue)] : [min, max];
  const x = (value) => (high > low ? 0.01 + (0.98 * (value - low)) / (high - low) : 0.5);
  const scale = niceScale(0, Math.max(...bars, 1), { integer: true });
  const step = (max - min) / bars.length;
  const column = (count, index) => {
    const [from, to] = bars.length === 1 || max <= min ? [0.48, 0.52] : [x(min + index * step), x(min + (index + 1) * step)];
    return svg(
      "rect",
      {
        class: "column",
        x: percent(from + (to - from) * 0.03),
        width: percent((to - from) * 0.94),
        y: percent(1 - scale.at(count)),
        height: percent(scale.at(count)),
      },
      svg("title", {}, plural(count, "node")),
    );
  };
  const line = (value, name) => svg("line", { class: name, x1: percent(x(value)), x2: percent(x(value)), y1: 0, y2: "100%" });
  const nodeText = hasNodeValue ? `, this node ${format(nodeValue)}` : "";
  const label = `${nodes} nodes from ${format(min)} to ${format(max)}, median ${format(median)}${nodeText}`;
  const below = [el("span", {}, format(low)), el("span", {}, format(high))];
  return chart(
    { label, title: "nodes", note: `median ${format(median)}`, ticks: scale.ticks.map((tick) => [scale.at(tick), String(tick)]) },
    below,
    svg("rect", { class: "band", x: percent(x(p5)), y: 0, width: percent(Math.max(0.002, x(p95) - x(p5))), height: "100%" }),
    ...bars.map(column),
    line(median, "median"),
    hasNodeValue && line(nodeValue, "this-node"),
  );
}

// The values of one node over time, with a band for 90 % of the fleet.
export function historyChart(values, unit, peers = null) {
  const format = (value) => formatMeasurement(value, unit);
  const times = values.map((point) => Date.parse(point.at));
  const all = values.map((point) => point.value).concat(peers ? [peers.p5, peers.p95] : []);
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const scale = niceScale(Math.min(...all), Math.max(...all));
  const x = (time) => percent(to > from ? 0.02 + (0.96 * (time - from)) / (to - from) : 0.5);
  const y = (value) => percent(1 - scale.at(value));
  const segment = (point, index) =>
    index > 0 &&
    svg("line", { class: "line", x1: x(times[index - 1]), x2: x(times[index]), y1: y(values[index - 1].value), y2: y(point.value) });
  const dot = (point, index) =>
    svg(
      "circle",
      { class: index === values.length - 1 ? "dot last" : "dot", cx: x(times[index]), cy: y(point.value), r: 3.5 },
      svg("title", {}, `${formatTimestamp(point.at)}: ${format(point.value)}`),
    );
  const last = values.at(-1);
  const peersText = peers ? `; 90 % of the fleet: ${format(peers.p5)} to ${format(peers.p95)}` : "";
  const below = [values[0], last].map(({ at }) => el("span", {}, formatTimestamp(at).slice(0, 10)));
  return chart(
    { label: `${values.length} results, the last ${format(last.value)}${peersText}`, title: unitName(unit), ticks: valueTicks(scale, unit) },
    below,
    peers &&
      svg("rect", {
        class: "band",
        x: 0,
        width: "100%",
        y: y(peers.p95),
        height: percent(Math.max(0.01, scale.at(peers.p95) - scale.at(peers.p5))),
      }),
    ...values.map(segment),
    ...values.map(dot),
  );
}

// More labels than these would overlap on a phone.
const MAX_DAY_LABELS = 8;

// Node-hours per day as bars, with the number of faults above, and the daily limit as a line.
export function dailyChart(rows, limit) {
  const scale = niceScale(0, Math.max(...rows.map((row) => row.node_hours), limit ?? 0, 1), { steps: 4 });
  const slot = 1 / Math.max(1, rows.length);
  const labelled = Math.ceil(rows.length / MAX_DAY_LABELS);
  const bar = (row, index) => {
    const [left, middle, height] = [(index + 0.15) * slot, percent((index + 0.5) * slot), scale.at(row.node_hours)];
    const tooltip = `${row.day.slice(0, 10)}: ${row.node_hours.toFixed(1)} node-hours, ${plural(row.faults, "fault")} found, ${row.closed} closed`;
    return svg(
      "g",
      {},
      svg("title", {}, tooltip),
      svg("rect", { class: "column", x: percent(left), width: percent(slot * 0.7), y: percent(1 - height), height: percent(height) }),
      row.faults > 0 &&
        svg("text", { class: "fault", x: middle, y: percent(1 - height), dy: -4, "text-anchor": "middle" }, `✕${row.faults}`),
      index % labelled === 0 && svg("text", { class: "tick", x: middle, y: "100%", dy: 15, "text-anchor": "middle" }, row.day.slice(5, 10)),
    );
  };
  const limitAt = limit ? percent(1 - scale.at(limit)) : null;
  return chart(
    {
      name: "days",
      label: `Node-hours by day: ${rows.map((row) => `${row.day.slice(5, 10)} ${row.node_hours.toFixed(0)}`).join(", ")}`,
      title: "node-hours",
      ticks: valueTicks(scale, "count"),
    },
    null,
    ...rows.map(bar),
    limitAt && svg("line", { class: "median", x1: 0, x2: "100%", y1: limitAt, y2: limitAt }),
  );
}

// A timeline with one lane for each kind of entry.
const LANES = [
  ["results", "Runs"],
  ["boot", "Boots"],
  ["act", "Marks, repairs, commands"],
];
const MARKER_PATHS = {
  fail: "M-5 -5L5 5M5 -5L-5 5",
  result: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0",
  boot: "M0 -6L6 5H-6Z",
  act: "M0 -5L5 0L0 5L-5 0Z",
};
export function timelineChart(entries) {
  const times = entries.map((entry) => Date.parse(entry.at));
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const x = (time) => percent(to > from ? 0.01 + (0.98 * (time - from)) / (to - from) : 0.5);
  const lane = (index) => 1 - (index + 0.5) / LANES.length;
  const marker = (entry, at) => {
    const isResult = entry.kind === "results";
    const shape = isResult ? (entry.what === "fail" ? "fail" : "result") : entry.kind;
    return svg(
      "svg",
      { class: "marker", x: x(Date.parse(entry.at)), y: percent(1 - at) },
      svg(
        "path",
        { class: `event ${isResult ? entry.what : entry.kind}`, d: MARKER_PATHS[shape] },
        svg("title", {}, `${formatTimestamp(entry.at)}: ${plainText(entry.text || entry.what)}`),
      ),
    );
  };
  const below = [from, to].map((time) => el("span", {}, formatTimestamp(new Date(time).toISOString())));
  return chart(
    {
      name: "lanes",
      label: `${entries.length} events; each is in the table below`,
      ticks: LANES.map(([, name], index) => [lane(index), name]),
    },
    below,
    ...LANES.flatMap(([kind], index) => entries.filter((entry) => entry.kind === kind).map((entry) => marker(entry, lane(index)))),
  );
}

// Counts as parts of one bar, by CSS class.
export const stackedBar = (shares, label) =>
  el(
    "div",
    { class: "stacked-bar", role: "img", "aria-label": label },
    ...shares
      .filter(([, count]) => count > 0)
      .map(([code, count]) => el("span", { class: code, style: { "flex-grow": String(count) } })),
  );
