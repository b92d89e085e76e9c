// By what the fleet is coloured, and what a filter matches. Everything here works on numbers of rows of the map that the controller sent.

import { STATES, STEPS, ramp, tones } from "./colours.js";
import { figure, length, now, title } from "./words.js";

const COLUMNS = {
  pool: ["pool", "pools"],
  rack: ["rack", "racks"],
  sku: ["sku", "skus"],
  health: ["health", "health"],
  life: ["life", "lives"],
  use: ["use", "uses"],
  severity: ["severity", "severities"],
};

// The map with words instead of places.
export class Fleet {
  constructor(map) {
    this.map = map;
    this.count = map.nodes.length;
    this.at = Object.fromEntries(map.columns.map((name, place) => [name, place]));
  }

  name(node) {
    return this.map.nodes[node][this.at.node];
  }

  word(node, key) {
    const [column, list] = COLUMNS[key];
    const place = this.map.nodes[node][this.at[column]];
    return place === null ? null : this.map[list][place];
  }

  // In milliseconds; null where something was never tested.
  validated(node) {
    const minutes = this.map.nodes[node][this.at.validated];
    return minutes === null ? null : minutes * 60_000;
  }

  groups(key) {
    const groups = new Map();
    for (let node = 0; node < this.count; node += 1) {
      const name = key === "none" ? "All nodes" : (this.word(node, key) ?? "Unknown");
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(node);
    }
    const order = new Intl.Collator("en", { numeric: true });
    return [...groups].map(([name, nodes]) => ({ name, nodes })).sort((a, b) => order.compare(a.name, b.name));
  }

  has(key) {
    return this.map[COLUMNS[key][1]].length > 0;
  }
}

function byWord(fleet, key, words) {
  const tone = tones();
  const looks = words.map((code) => ({
    code: code ?? "none",
    text: title(code ?? "nothing found"),
    colour: tone[(STATES[code ?? "none"] ?? STATES.unknown).tone],
    mark: (STATES[code ?? "none"] ?? STATES.unknown).mark,
  }));
  const places = new Map(words.map((code, place) => [code, place]));
  return { looks, lookOf: (node) => places.get(fleet.word(node, key)) ?? 0 };
}

function byAge(fleet, period) {
  const tone = tones();
  const quarter = period / 4;
  const looks = [0, 1, 2, 3].map((step) => ({
    code: `q${step}`,
    text: `${step ? `${length(step * quarter)} to ` : "up to "}${length((step + 1) * quarter)}`,
    colour: ramp(1 - (step + 1) / 5),
    mark: "solid",
  }));
  looks.push(
    { code: "overdue", text: `over ${length(period)}`, colour: tone.bad, mark: "cross" },
    { code: "never", text: "never all tested", colour: tone.dim, mark: "hollow" },
  );
  const at = now();
  const lookOf = (node) => {
    const validated = fleet.validated(node);
    return validated === null ? 5 : Math.min(4, Math.max(0, Math.floor((at - validated) / quarter)));
  };
  return { looks, lookOf };
}

// `values` by name of node. What lies outside of the middle nine tenths is in the first or last step.
function byFigure(fleet, { values, unit }) {
  const sorted = Object.values(values).sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
  const [low, high] = [at(0.05), at(0.95)];
  const wide = high > low ? high - low : 1;
  const bound = (step) => figure(low + (wide * step) / STEPS, unit);
  const looks = Array.from({ length: STEPS }, (_, step) => ({
    code: `s${step}`,
    text: step === 0 ? `below ${bound(1)}` : step === STEPS - 1 ? `from ${bound(step)}` : `${bound(step)} …`,
    colour: ramp((step + 0.5) / STEPS),
    mark: "solid",
  }));
  looks.push({ code: "none", text: "no value", colour: tones().dim, mark: "hollow" });
  const lookOf = (node) => {
    const value = values[fleet.name(node)];
    return value === undefined ? STEPS : Math.min(STEPS - 1, Math.max(0, Math.floor(((value - low) / wide) * STEPS)));
  };
  return { looks, lookOf };
}

export function looksOf(fleet, by, { period, measured }) {
  if (by === "age") return byAge(fleet, period);
  if (by === "severity") return byWord(fleet, "severity", [null, ...fleet.map.severities]);
  if (by.startsWith("figure:")) return byFigure(fleet, measured ?? { values: {}, unit: "count" });
  const list = COLUMNS[by] ? by : "health";
  return byWord(fleet, list, fleet.map[COLUMNS[list][1]]);
}

const escape = (text) => text.replace(/[.+?^${}()|[\]\\]/g, "\\$&");

// `gpu* health:fail`: every word must hold; a word with a colon is about that column, another about the name.
export function filterOf(fleet, text) {
  const tests = text
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => {
      const [key, value] = word.split(/:(.*)/);
      if (value !== undefined && COLUMNS[key])
        return (node) => (fleet.word(node, key) ?? "none").toLowerCase().startsWith(value);
      const pattern = word.includes("*") ? new RegExp(`^${word.split("*").map(escape).join(".*")}$`) : null;
      return (node) => {
        const name = fleet.name(node).toLowerCase();
        return pattern ? pattern.test(name) : name.includes(word);
      };
    });
  return (node) => tests.every((test) => test(node));
}
