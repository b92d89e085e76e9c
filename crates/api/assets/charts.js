// Small plots. Each has a text alternative for screen readers; exact values are in the table beside it.

import { el, svg } from "./dom.js";
import { figure, stamp } from "./words.js";

const plot = (width, height, label, ...content) =>
  svg(
    "svg",
    { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    ...content,
  );

// The distribution of a measurement over the fleet; `mine` is one node's value.
export function spread({ least, most, median, p5, p95, bars, nodes }, unit, mine = null) {
  const [width, height] = [480, 90];
  const [low, high] = mine === null || mine === undefined ? [least, most] : [Math.min(least, mine), Math.max(most, mine)];
  const wide = high > low ? high - low : 1;
  const x = (value) => (high > low ? ((value - low) / wide) * (width - 12) + 6 : width / 2);
  const tallest = Math.max(...bars, 1);
  const step = (most - least) / bars.length;
  const column = (count, place) => {
    const from = bars.length === 1 ? width / 2 - 10 : x(least + place * step);
    const to = bars.length === 1 ? width / 2 + 10 : x(least + (place + 1) * step);
    const tall = count ? Math.max(2, (count / tallest) * (height - 22)) : 0;
    return svg("rect", {
      class: "column",
      x: from + 0.5,
      y: height - 14 - tall,
      width: Math.max(1, to - from - 1),
      height: tall,
    });
  };
  const line = (value, name) => svg("line", { class: name, x1: x(value), x2: x(value), y1: 2, y2: height - 14 });
  const label = `${nodes} nodes from ${figure(least, unit)} to ${figure(most, unit)}, median ${figure(median, unit)}${mine === null || mine === undefined ? "" : `, this node ${figure(mine, unit)}`}`;
  return el(
    "figure",
    { class: "spread" },
    plot(
      width,
      height,
      label,
      svg("rect", { class: "band", x: x(p5), y: 2, width: Math.max(1, x(p95) - x(p5)), height: height - 16 }),
      ...bars.map(column),
      line(median, "median"),
      mine !== null && mine !== undefined && line(mine, "mine"),
    ),
    el(
      "figcaption",
      { class: "ends" },
      el("span", {}, figure(low, unit)),
      el("span", {}, `median ${figure(median, unit)}`),
      el("span", {}, figure(high, unit)),
    ),
  );
}

// One node's values over time, over the band of its peers.
export function past(values, unit, peers = null) {
  const [width, height] = [480, 90];
  const times = values.map((one) => Date.parse(one.at));
  const known = values.map((one) => one.value).concat(peers ? [peers.p5, peers.p95] : []);
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (at) => (to > from ? ((at - from) / (to - from)) * (width - 16) + 8 : width / 2);
  const y = (value) => (high > low ? height - 8 - ((value - low) / (high - low)) * (height - 16) : height / 2);
  const points = values.map((one, place) => [x(times[place]), y(one.value)]);
  const dot = ([cx, cy], place) =>
    svg(
      "circle",
      { class: place === points.length - 1 ? "dot last" : "dot", cx, cy, r: 3.5 },
      svg("title", {}, `${stamp(values[place].at)}: ${figure(values[place].value, unit)}`),
    );
  const label = `${values.length} results, the last ${figure(values.at(-1).value, unit)}${peers ? `; 90 % of the fleet: ${figure(peers.p5, unit)} to ${figure(peers.p95, unit)}` : ""}`;
  return el(
    "figure",
    { class: "spread" },
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
      { class: "ends" },
      el("span", {}, stamp(values[0].at).slice(0, 10)),
      el("span", {}, `now ${figure(values.at(-1).value, unit)}`),
      el("span", {}, stamp(values.at(-1).at).slice(0, 10)),
    ),
  );
}

// Daily node-hours as bars, with a mark on days with faults, against the limit if there is one.
export function days(rows, limit) {
  const [width, height] = [960, 200];
  const most = Math.max(...rows.map((row) => row.node_hours), limit ?? 0, 1);
  const wide = width / Math.max(1, rows.length);
  const tall = (hours) => (hours / most) * (height - 40);
  const bar = (row, place) =>
    svg(
      "g",
      {},
      svg(
        "title",
        {},
        `${row.day.slice(0, 10)}: ${row.node_hours.toFixed(1)} node-hours, ${row.faults} faults found, ${row.closed} closed`,
      ),
      svg("rect", {
        class: "column",
        x: place * wide + wide * 0.15,
        width: wide * 0.7,
        y: height - 14 - tall(row.node_hours),
        height: tall(row.node_hours),
      }),
      row.faults > 0 &&
        svg(
          "text",
          { class: "fault", x: place * wide + wide / 2, y: height - 20 - tall(row.node_hours), "text-anchor": "middle" },
          `✕${row.faults}`,
        ),
      (rows.length <= 16 || place % Math.ceil(rows.length / 16) === 0) &&
        svg(
          "text",
          { class: "tick", x: place * wide + wide / 2, y: height - 2, "text-anchor": "middle" },
          row.day.slice(5, 10),
        ),
    );
  const label = `Node-hours by day: ${rows.map((row) => `${row.day.slice(5, 10)} ${row.node_hours.toFixed(0)}`).join(", ")}`;
  return svg(
    "svg",
    { class: "plot days", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...rows.map(bar),
    limit && svg("line", { class: "median", x1: 0, x2: width, y1: height - 14 - tall(limit), y2: height - 14 - tall(limit) }),
  );
}

// A timeline with one lane per kind of event.
const LANES = [
  ["results", "Runs"],
  ["boot", "Boots"],
  ["act", "Marks, repairs, commands"],
];
export function lanes(moments) {
  const [width, lane] = [960, 26];
  const times = moments.map((one) => Date.parse(one.at));
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const x = (at) => (to > from ? ((at - from) / (to - from)) * (width - 200) + 180 : width / 2);
  const shape = (one, y) => {
    const at = x(Date.parse(one.at));
    const told = svg("title", {}, `${stamp(one.at)}: ${one.text || one.what}`);
    if (one.kind === "results") {
      const bad = one.what === "fail";
      return svg(
        "path",
        {
          class: `moment ${one.what}`,
          d: bad
            ? `M${at - 5} ${y - 5}L${at + 5} ${y + 5}M${at + 5} ${y - 5}L${at - 5} ${y + 5}`
            : `M${at - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`,
        },
        told,
      );
    }
    return svg(
      "path",
      {
        class: `moment ${one.kind}`,
        d:
          one.kind === "boot"
            ? `M${at} ${y - 6}L${at + 6} ${y + 5}H${at - 6}Z`
            : `M${at} ${y - 5}L${at + 5} ${y}L${at} ${y + 5}L${at - 5} ${y}Z`,
      },
      told,
    );
  };
  const height = LANES.length * lane + 20;
  return svg(
    "svg",
    {
      class: "plot lanes",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${moments.length} events; each is in the table below`,
    },
    ...LANES.flatMap(([kind, name], place) => {
      const y = place * lane + lane / 2;
      return [
        svg("line", { class: "lane", x1: 180, x2: width - 10, y1: y, y2: y }),
        svg("text", { class: "tick", x: 0, y: y + 4 }, name),
        ...moments.filter((one) => one.kind === kind).map((one) => shape(one, y)),
      ];
    }),
    svg("text", { class: "tick", x: 180, y: height - 4 }, stamp(new Date(from).toISOString())),
    svg("text", { class: "tick", x: width - 10, y: height - 4, "text-anchor": "end" }, stamp(new Date(to).toISOString())),
  );
}

// Shares of a whole, as a bar; the cells beside it name them.
export const stack = (parts, label) =>
  el(
    "div",
    { class: "share", role: "img", "aria-label": label },
    ...parts
      .filter(([, count]) => count > 0)
      .map(([code, count]) => el("span", { class: code, style: { "flex-grow": String(count) } })),
  );
