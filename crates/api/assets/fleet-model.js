// The fleet as columns: reading, grouping, colour schemes and filters. A node is identified by its row number in the controller's response.

import { RAMP_STEPS, STATUS_STYLES, rampColour, themeColours } from "./colours.js";
import { clusterNow, codeLabel, formatDuration, formatMeasurement, severityRank, severityText } from "./format.js";

// By filter key: the name of the column, and of the list that its values are indices of.
const COLUMNS = {
  pool: ["pool", "pools"],
  rack: ["rack", "racks"],
  sku: ["sku", "skus"],
  health: ["health", "health"],
  state: ["state", "states"],
  occupancy: ["occupancy", "occupancies"],
  severity: ["severity", "severities"],
};

// Filter keys of open findings, of which a node may have several: the list of their names, and the place in an entry of `findings`.
const FINDING_KEYS = { reason: ["reasons", 1], check: ["checks", 2] };

// The keys by which a filter selects nodes, besides the name.
export const FILTER_KEYS = [...Object.keys(COLUMNS), ...Object.keys(FINDING_KEYS)];

// Sorts by name in natural order: rack 9 before rack 10.
function naturalSort(groups) {
  const segments = new Map(groups.map(({ name }) => [name, name.split(/(\d+)/)]));
  return groups.sort((a, b) => {
    const [left, right] = [segments.get(a.name), segments.get(b.name)];
    for (let part = 0; part < Math.min(left.length, right.length); part += 1) {
      if (left[part] === right[part]) continue;
      if (part % 2 && Number(left[part]) !== Number(right[part])) return Number(left[part]) - Number(right[part]);
      return left[part] < right[part] ? -1 : 1;
    }
    return left.length - right.length;
  });
}

// Gives access to the response by name. Columns are extracted once, because a filter reads them for ten thousand nodes.
export class Fleet {
  #columns = new Map();
  #lowerCaseNames = null;
  #nodeFindings = null;

  constructor(map) {
    this.map = map;
    this.count = map.nodes.length;
    this.columnIndex = Object.fromEntries(map.columns.map((name, index) => [name, index]));
  }

  name(node) {
    return this.map.nodes[node][this.columnIndex.node];
  }

  // Names in lower case, for filters.
  get lowerCaseNames() {
    this.#lowerCaseNames ??= this.map.nodes.map((row) => row[this.columnIndex.node].toLowerCase());
    return this.#lowerCaseNames;
  }

  // Returns the values of a column and the index of each node's value. The last value, null, is for nodes without one.
  column(key) {
    let column = this.#columns.get(key);
    if (!column) {
      const [name, list] = COLUMNS[key];
      const [values, position] = [[...this.map[list], null], this.columnIndex[name]];
      column = { values, indices: Uint32Array.from(this.map.nodes, (row) => row[position] ?? values.length - 1) };
      this.#columns.set(key, column);
    }
    return column;
  }

  value(node, key) {
    const { values, indices } = this.column(key);
    return values[indices[node]];
  }

  // Returns the time since which every test has a result, in milliseconds; null if a test never ran.
  validated(node) {
    const minutes = this.map.nodes[node][this.columnIndex.validated];
    return minutes === null ? null : minutes * 60_000;
  }

  groups(key) {
    const groups = new Map();
    for (let node = 0; node < this.count; node += 1) {
      const name = key === "none" ? "All nodes" : (this.value(node, key) ?? "Unknown");
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(node);
    }
    return naturalSort([...groups].map(([name, nodes]) => ({ name, nodes })));
  }

  // Returns whether both have the same nodes in the same groups, in the same order.
  hasSameLayout(other, key) {
    if (this.count !== other.count) return false;
    const group = (fleet, node) => (key === "none" ? null : fleet.value(node, key));
    for (let node = 0; node < this.count; node += 1)
      if (this.name(node) !== other.name(node) || group(this, node) !== group(other, node)) return false;
    return true;
  }

  // Whether a column has any value.
  has(key) {
    return this.map[COLUMNS[key][1]].length > 0;
  }

  // Returns the nodes by reason or check of their open findings: name and node numbers, most nodes first.
  findingGroups(key) {
    const [list, place] = FINDING_KEYS[key];
    const groups = this.map[list].map((name) => ({ name, nodes: new Set() }));
    for (const entry of this.map.findings) groups[entry[place]].nodes.add(entry[0]);
    return groups.sort((a, b) => b.nodes.size - a.nodes.size);
  }

  // Returns the reasons of a node's open findings.
  reasons(node) {
    if (!this.#nodeFindings) {
      this.#nodeFindings = new Map();
      for (const [row, reason] of this.map.findings)
        this.#nodeFindings.set(row, (this.#nodeFindings.get(row) ?? new Set()).add(this.map.reasons[reason]));
    }
    return [...(this.#nodeFindings.get(node) ?? [])];
  }

  // Returns how urgently an operator wants to see a node, 0 first: failing nodes, nodes out of service, unknown ones, healthy ones; within
  // each the most severe finding first.
  urgency(node) {
    const [health, state] = [this.value(node, "health"), this.value(node, "state")];
    const group = health === "fail" ? 0 : state !== "in-service" ? 1 : health === "pass" ? 3 : 2;
    return 100 * group - severityRank(this.value(node, "severity"));
  }
}

// A colour scheme has `styles`, and `styleOf` returns the index of a node's style.
function categoryScheme(fleet, key, values) {
  const colours = themeColours();
  const styles = values.map((code) => ({
    code: code ?? "none",
    text: codeLabel(code ? severityText(code) : "no finding"),
    colour: colours[(STATUS_STYLES[code ?? "none"] ?? STATUS_STYLES.unknown).tone],
    shape: (STATUS_STYLES[code ?? "none"] ?? STATUS_STYLES.unknown).shape,
  }));
  const column = fleet.column(key);
  const indices = column.values.map((code) => Math.max(0, values.indexOf(code)));
  return { styles, styleOf: (node) => indices[column.indices[node]] };
}

function ageScheme(fleet, period) {
  const colours = themeColours();
  const quarter = period / 4;
  const styles = [0, 1, 2, 3].map((step) => ({
    code: `q${step}`,
    text: `${step ? `${formatDuration(step * quarter)} to ` : "up to "}${formatDuration((step + 1) * quarter)}`,
    colour: rampColour(1 - (step + 1) / 5),
    shape: "solid",
  }));
  styles.push(
    { code: "overdue", text: `over ${formatDuration(period)}`, colour: colours.bad, shape: "cross" },
    { code: "never", text: "not fully tested", colour: colours.dim, shape: "hollow" },
  );
  const now = clusterNow();
  const styleOf = (node) => {
    const validated = fleet.validated(node);
    return validated === null ? 5 : Math.min(4, Math.max(0, Math.floor((now - validated) / quarter)));
  };
  return { styles, styleOf };
}

// `values`: by node name. The lowest and highest 5 % get the first and last colour.
function measurementScheme(fleet, { values, unit }) {
  const sorted = Object.values(values).sort((a, b) => a - b);
  const valueAt = (quantile) => sorted[Math.min(sorted.length - 1, Math.floor(quantile * sorted.length))] ?? 0;
  const [low, high] = [valueAt(0.05), valueAt(0.95)];
  const range = high > low ? high - low : 1;
  const bound = (step) => formatMeasurement(low + (range * step) / RAMP_STEPS, unit);
  const styles = Array.from({ length: RAMP_STEPS }, (_, step) => ({
    code: `s${step}`,
    text: step === 0 ? `below ${bound(1)}` : step === RAMP_STEPS - 1 ? `from ${bound(step)}` : `${bound(step)} to ${bound(step + 1)}`,
    colour: rampColour((step + 0.5) / RAMP_STEPS),
    shape: "solid",
  }));
  styles.push({ code: "none", text: "no value", colour: themeColours().dim, shape: "hollow" });
  const styleOf = (node) => {
    const value = values[fleet.name(node)];
    return value === undefined ? RAMP_STEPS : Math.min(RAMP_STEPS - 1, Math.max(0, Math.floor(((value - low) / range) * RAMP_STEPS)));
  };
  return { styles, styleOf };
}

export function colourScheme(fleet, mode, { period, measurement }) {
  if (mode === "age") return ageScheme(fleet, period);
  if (mode === "severity") return categoryScheme(fleet, "severity", [null, ...fleet.map.severities]);
  if (mode.startsWith("metric:")) return measurementScheme(fleet, measurement ?? { values: {}, unit: "count" });
  const key = COLUMNS[mode] ? mode : "health";
  return categoryScheme(fleet, key, fleet.map[COLUMNS[key][1]]);
}

const escapeRegExp = (text) => text.replace(/[.+?^${}()|[\]\\]/g, "\\$&");

// Splits a filter into terms: `{ key, value, exact }` or `{ name }`. Quotes keep a value with spaces together.
export function filterTerms(text) {
  return [...text.toLowerCase().matchAll(/(?:"[^"]*"|[^\s"])+/g)].map(([raw]) => {
    const [, key, separator, value] = /^([a-z]+)([:=])(.*)$/s.exec(raw) ?? [];
    const unquoted = (part) => part.replaceAll('"', "");
    if (!FILTER_KEYS.includes(key)) return { raw, name: unquoted(raw) };
    return { raw, key, value: unquoted(value), exact: separator === "=" };
  });
}

// Returns the filter with this value of a key in place of any other.
export function withFilterTerm(text, key, value) {
  const others = filterTerms(text).filter((term) => term.key !== key);
  return [...others.map((term) => term.raw), `${key}=${/\s/.test(value) ? `"${value}"` : value}`].join(" ");
}

// Returns whether each value of a column or of the findings' names matches a term.
function matchingValues(values, { value, exact }) {
  return values.map((code) => {
    const name = (code ?? "none").toLowerCase();
    return exact ? name === value : name.startsWith(value);
  });
}

function findingPredicate(fleet, term) {
  const [list, place] = FINDING_KEYS[term.key];
  const hits = matchingValues(fleet.map[list], term);
  const nodes = new Set(fleet.map.findings.filter((entry) => hits[entry[place]]).map(([node]) => node));
  return (node) => nodes.has(node);
}

// Returns a predicate for a filter such as `gpu* health:fail`. All terms must match: `key:prefix` and `key=value` match a column or the
// open findings, other terms the name.
export function nodeFilter(fleet, text) {
  const predicates = filterTerms(text).map((term) => {
    if (FINDING_KEYS[term.key]) return findingPredicate(fleet, term);
    if (term.key) {
      const { values, indices } = fleet.column(term.key);
      const hits = matchingValues(values, term);
      return (node) => hits[indices[node]];
    }
    const names = fleet.lowerCaseNames;
    if (!term.name.includes("*")) return (node) => names[node].includes(term.name);
    const pattern = new RegExp(`^${term.name.split("*").map(escapeRegExp).join(".*")}$`);
    return (node) => pattern.test(names[node]);
  });
  const [first, ...others] = predicates;
  if (!others.length) return first ?? (() => true);
  return (node) => predicates.every((predicate) => predicate(node));
}
