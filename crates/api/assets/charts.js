// Charts. Each has a text alternative for screen readers; the tables contain the exact values.

import { el, plainText, svg } from "./dom.js";
import { formatMeasurement, formatTimestamp, plural } from "./format.js";

const plot = (width, height, label, ...content) =>
  svg(
    "svg",
    { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    ...content,
  );

// The distribution of a measurement over the fleet. `nodeValue` highlights the value of one node.
export function histogram({ min, max, median, p5, p95, bars, nodes }, unit, nodeValue = null) {
  const format = (value) => formatMeasurement(value, unit);
  const hasNodeValue = nodeValue !== null && nodeValue !== undefined;
  const [width, height] = [480, 90];
  const [low, high] = hasNodeValue ? [Math.min(min, nodeValue), Math.max(max, nodeValue)] : [min, max];
  const range = high > low ? high - low : 1;
  const x = (value) => (high > low ? ((value - low) / range) * (width - 12) + 6 : width / 2);
  const maxCount = Math.max(...bars, 1);
  const step = (max - min) / bars.length;
  const column = (count, index) => {
    const from = bars.length === 1 ? width / 2 - 10 : x(min + index * step);
    const to = bars.length === 1 ? width / 2 + 10 : x(min + (index + 1) * step);
    const barHeight = count ? Math.max(2, (count / maxCount) * (height - 22)) : 0;
    return svg("rect", {
      class: "column",
      x: from + 0.5,
      y: height - 14 - barHeight,
      width: Math.max(1, to - from - 1),
      height: barHeight,
    });
  };
  const line = (value, name) => svg("line", { class: name, x1: x(value), x2: x(value), y1: 2, y2: height - 14 });
  const nodeText = hasNodeValue ? `, this node ${format(nodeValue)}` : "";
  const label = `${nodes} nodes from ${format(min)} to ${format(max)}, median ${format(median)}${nodeText}`;
  return el(
    "figure",
    { class: "chart" },
    plot(
      width,
      height,
      label,
      svg("rect", { class: "band", x: x(p5), y: 2, width: Math.max(1, x(p95) - x(p5)), height: height - 16 }),
      ...bars.map(column),
      line(median, "median"),
      hasNodeValue && line(nodeValue, "this-node"),
    ),
    el(
      "figcaption",
      { class: "axis-labels" },
      el("span", {}, format(low)),
      el("span", {}, `median ${format(median)}`),
      el("span", {}, format(high)),
    ),
  );
}

// The values of one node over time, with a band for 90 % of the fleet.
export function historyChart(values, unit, peers = null) {
  const format = (value) => formatMeasurement(value, unit);
  const [width, height] = [480, 90];
  const times = values.map((point) => Date.parse(point.at));
  const all = values.map((point) => point.value).concat(peers ? [peers.p5, peers.p95] : []);
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (time) => (to > from ? ((time - from) / (to - from)) * (width - 16) + 8 : width / 2);
  const y = (value) => (high > low ? height - 8 - ((value - low) / (high - low)) * (height - 16) : height / 2);
  const points = values.map((point, index) => [x(times[index]), y(point.value)]);
  const dot = ([cx, cy], index) =>
    svg(
      "circle",
      { class: index === points.length - 1 ? "dot last" : "dot", cx, cy, r: 3.5 },
      svg("title", {}, `${formatTimestamp(values[index].at)}: ${format(values[index].value)}`),
    );
  const last = values.at(-1);
  const peersText = peers ? `; 90 % of the fleet: ${format(peers.p5)} to ${format(peers.p95)}` : "";
  const label = `${values.length} results, the last ${format(last.value)}${peersText}`;
  return el(
    "figure",
    { class: "chart" },
    plot(
      width,
      height,
      label,
      peers && svg("rect", { class: "band", x: 0, width, y: y(peers.p95), height: Math.max(1, y(peers.p5) - y(peers.p95)) }),
      svg("polyline", { class: "line", points: points.map((point) => point.join(",")).join(" ") }),
      ...points.map(dot),
    ),
    el(
      "figcaption",
      { class: "axis-labels" },
      el("span", {}, formatTimestamp(values[0].at).slice(0, 10)),
      el("span", {}, `now ${format(last.value)}`),
      el("span", {}, formatTimestamp(last.at).slice(0, 10)),
    ),
  );
}

// Node-hours per day as bars, with the number of faults above, and the daily limit as a line.
export function dailyChart(rows, limit) {
  const [width, height] = [960, 200];
  const max = Math.max(...rows.map((row) => row.node_hours), limit ?? 0, 1);
  // The margins leave room for the first and the last label.
  const margin = 14;
  const slot = (width - 2 * margin) / Math.max(1, rows.length);
  const left = (index) => margin + index * slot;
  const barHeight = (hours) => (hours / max) * (height - 40);
  const bar = (row, index) =>
    svg(
      "g",
      {},
      svg(
        "title",
        {},
        `${row.day.slice(0, 10)}: ${row.node_hours.toFixed(1)} node-hours, ${plural(row.faults, "fault")} found, ${row.closed} closed`,
      ),
      svg("rect", {
        class: "column",
        x: left(index) + slot * 0.15,
        width: slot * 0.7,
        y: height - 14 - barHeight(row.node_hours),
        height: barHeight(row.node_hours),
      }),
      row.faults > 0 &&
        svg(
          "text",
          { class: "fault", x: left(index) + slot / 2, y: height - 20 - barHeight(row.node_hours), "text-anchor": "middle" },
          `✕${row.faults}`,
        ),
      (rows.length <= 16 || index % Math.ceil(rows.length / 16) === 0) &&
        svg(
          "text",
          { class: "tick", x: left(index) + slot / 2, y: height - 2, "text-anchor": "middle" },
          row.day.slice(5, 10),
        ),
    );
  const label = `Node-hours by day: ${rows.map((row) => `${row.day.slice(5, 10)} ${row.node_hours.toFixed(0)}`).join(", ")}`;
  return svg(
    "svg",
    { class: "plot days", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...rows.map(bar),
    limit && svg("line", { class: "median", x1: 0, x2: width, y1: height - 14 - barHeight(limit), y2: height - 14 - barHeight(limit) }),
  );
}

// A timeline with one lane for each kind of entry.
const LANES = [
  ["results", "Runs"],
  ["boot", "Boots"],
  ["act", "Marks, repairs, commands"],
];
export function timelineChart(entries) {
  const [width, lane] = [960, 26];
  const times = entries.map((entry) => Date.parse(entry.at));
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const x = (time) => (to > from ? ((time - from) / (to - from)) * (width - 200) + 180 : width / 2);
  const marker = (entry, y) => {
    const cx = x(Date.parse(entry.at));
    const tooltip = svg("title", {}, `${formatTimestamp(entry.at)}: ${plainText(entry.text || entry.what)}`);
    if (entry.kind === "results") {
      const failed = entry.what === "fail";
      return svg(
        "path",
        {
          class: `event ${entry.what}`,
          d: failed
            ? `M${cx - 5} ${y - 5}L${cx + 5} ${y + 5}M${cx + 5} ${y - 5}L${cx - 5} ${y + 5}`
            : `M${cx - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`,
        },
        tooltip,
      );
    }
    return svg(
      "path",
      {
        class: `event ${entry.kind}`,
        d:
          entry.kind === "boot"
            ? `M${cx} ${y - 6}L${cx + 6} ${y + 5}H${cx - 6}Z`
            : `M${cx} ${y - 5}L${cx + 5} ${y}L${cx} ${y + 5}L${cx - 5} ${y}Z`,
      },
      tooltip,
    );
  };
  const height = LANES.length * lane + 20;
  return svg(
    "svg",
    {
      class: "plot lanes",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${entries.length} events; each is in the table below`,
    },
    ...LANES.flatMap(([kind, name], index) => {
      const y = index * lane + lane / 2;
      return [
        svg("line", { class: "lane", x1: 180, x2: width - 10, y1: y, y2: y }),
        svg("text", { class: "tick", x: 0, y: y + 4 }, name),
        ...entries.filter((entry) => entry.kind === kind).map((entry) => marker(entry, y)),
      ];
    }),
    svg("text", { class: "tick", x: 180, y: height - 4 }, formatTimestamp(new Date(from).toISOString())),
    svg("text", { class: "tick", x: width - 10, y: height - 4, "text-anchor": "end" }, formatTimestamp(new Date(to).toISOString())),
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
