// Colouring and filtering of the fleet. Everything here works on row numbers of the map that the controller sent.

import { STATES, STEPS, ramp, tones } from "./colours.js";
import { figure, length, now, severityText, title } from "./words.js";

const COLUMNS = {
  pool: ["pool", "pools"],
  rack: ["rack", "racks"],
  sku: ["sku", "skus"],
  health: ["health", "health"],
  life: ["life", "lives"],
  use: ["use", "uses"],
  severity: ["severity", "severities"],
};

// Natural order: rack 9 comes before rack 10.
function inOrder(groups) {
  const parted = new Map(groups.map(({ name }) => [name, name.split(/(\d+)/)]));
  return groups.sort((a, b) => {
    const [one, other] = [parted.get(a.name), parted.get(b.name)];
    for (let part = 0; part < Math.min(one.length, other.length); part += 1) {
      if (one[part] === other[part]) continue;
      if (part % 2 && Number(one[part]) !== Number(other[part])) return Number(one[part]) - Number(other[part]);
      return one[part] < other[part] ? -1 : 1;
    }
    return one.length - other.length;
  });
}

// The map with strings instead of indices. Columns are extracted once, because a filter reads them ten thousand times.
export class Fleet {
  #columns = new Map();
  #lower = null;

  constructor(map) {
    this.map = map;
    this.count = map.nodes.length;
    this.at = Object.fromEntries(map.columns.map((name, place) => [name, place]));
  }

  name(node) {
    return this.map.nodes[node][this.at.node];
  }

  // Names in lower case, for filters.
  get lower() {
    this.#lower ??= this.map.nodes.map((row) => row[this.at.node].toLowerCase());
    return this.#lower;
  }

  // The index into `words` of each node; the last one is for nodes without a value.
  column(key) {
    let column = this.#columns.get(key);
    if (!column) {
      const [name, list] = COLUMNS[key];
      const [words, at] = [[...this.map[list], null], this.at[name]];
      column = { words, places: Uint32Array.from(this.map.nodes, (row) => row[at] ?? words.length - 1) };
      this.#columns.set(key, column);
    }
    return column;
  }

  word(node, key) {
    const { words, places } = this.column(key);
    return words[places[node]];
  }

  // In milliseconds; null if something was never tested.
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
    return inOrder([...groups].map(([name, nodes]) => ({ name, nodes })));
  }

  // Whether the same nodes are in the same groups, in the same order.
  liesAs(other, key) {
    if (this.count !== other.count) return false;
    const group = (fleet, node) => (key === "none" ? null : fleet.word(node, key));
    for (let node = 0; node < this.count; node += 1)
      if (this.name(node) !== other.name(node) || group(this, node) !== group(other, node)) return false;
    return true;
  }

  has(key) {
    return this.map[COLUMNS[key][1]].length > 0;
  }
}

function byWord(fleet, key, words) {
  const tone = tones();
  const looks = words.map((code) => ({
    code: code ?? "none",
    text: title(code ? severityText(code) : "no finding"),
    colour: tone[(STATES[code ?? "none"] ?? STATES.unknown).tone],
    mark: (STATES[code ?? "none"] ?? STATES.unknown).mark,
  }));
  const column = fleet.column(key);
  const places = column.words.map((code) => Math.max(0, words.indexOf(code)));
  return { looks, lookOf: (node) => places[column.places[node]] };
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
    { code: "never", text: "not fully tested", colour: tone.dim, mark: "hollow" },
  );
  const at = now();
  const lookOf = (node) => {
    const validated = fleet.validated(node);
    return validated === null ? 5 : Math.min(4, Math.max(0, Math.floor((at - validated) / quarter)));
  };
  return { looks, lookOf };
}

// `values` by node name. Values outside the middle 90 % are in the first or last step.
function byFigure(fleet, { values, unit }) {
  const sorted = Object.values(values).sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
  const [low, high] = [at(0.05), at(0.95)];
  const wide = high > low ? high - low : 1;
  const bound = (step) => figure(low + (wide * step) / STEPS, unit);
  const looks = Array.from({ length: STEPS }, (_, step) => ({
    code: `s${step}`,
    text: step === 0 ? `below ${bound(1)}` : step === STEPS - 1 ? `from ${bound(step)}` : `${bound(step)} to ${bound(step + 1)}`,
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

// `gpu* health:fail`: every word must match; a word with a colon matches that column, any other the name.
export function filterOf(fleet, text) {
  const tests = text
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => {
      const [key, value] = word.split(/:(.*)/);
      if (value !== undefined && COLUMNS[key]) {
        const { words, places } = fleet.column(key);
        const hits = words.map((one) => (one ?? "none").toLowerCase().startsWith(value));
        return (node) => hits[places[node]];
      }
      const names = fleet.lower;
      if (!word.includes("*")) return (node) => names[node].includes(word);
      const pattern = new RegExp(`^${word.split("*").map(escape).join(".*")}$`);
      return (node) => pattern.test(names[node]);
    });
  const [first, ...others] = tests;
  if (!others.length) return first ?? (() => true);
  return (node) => tests.every((test) => test(node));
}
