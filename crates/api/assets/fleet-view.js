// All nodes as a map or a table, with a legend and a filter. Nodes that do not match the filter are hidden, and their number is shown.

import { badge, severityLegend } from "./colours.js";
import { el, href, nodeLink, replaceContent } from "./dom.js";
import { Fleet, colourScheme, filterTerms, nodeFilter, withFilterTerm } from "./fleet-model.js";
import { codeLabel, formatAge, formatCount, formatMeasurement, parseDuration, plural, severityRank, severityText, timeElement } from "./format.js";
import { NodeMap } from "./node-map.js";
import { table } from "./table.js";

// The columns by which the nodes that match a filter are counted, to see what they have in common.
const BREAKDOWN = [
  ["pool", "Pool"],
  ["rack", "Rack"],
  ["sku", "SKU"],
  ["state", "State"],
];
const MAX_VALUES = 5;

export class FleetView {
  // Called after each change of the nodes on display, and of the filter by a link.
  onRender = () => {};
  onFilter = () => {};
  listsAreLast = false;

  // `overview`: the element whose layout depends on the view.
  constructor(page, container, overview) {
    this.page = page;
    this.container = container;
    this.overview = overview;
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Legend" });
    this.matchText = el("span", { class: "dim", role: "status" });
    this.showAllButton = el("button", { type: "button", class: "quiet", hidden: true, on: { click: () => this.setFilter("") } }, "Show all");
    this.matchBar = el("div", { class: "match" }, this.matchText, this.showAllButton);
    this.breakdown = el("p", { class: "facts breakdown", hidden: true });
    this.map = new NodeMap({
      label: "Map of the nodes: arrow keys move, Enter opens a node, Escape leaves. For a table choose “Table”.",
      open: (node) => this.open(node),
      describe: (node) => this.describe(node),
    });
    page.onEvent((name) => name === "theme" && this.render(true));
  }

  get colourMode() {
    return this.page.query.get("colour") ?? "health";
  }

  get filter() {
    return this.page.query.get("filter") ?? "";
  }

  get group() {
    return this.page.query.get("group") ?? (this.fleet.has("rack") ? "rack" : "pool");
  }

  // Whether the filter or the legend hides a node.
  get isFiltered() {
    return Boolean(this.fleet) && this.matchCount < this.fleet.count;
  }

  get matchingNodes() {
    const nodes = [];
    for (let node = 0; node < this.fleet.count; node += 1) if (this.matches[node]) nodes.push(node);
    return nodes;
  }

  open(node) {
    location.hash = href(["nodes", this.fleet.name(node)]);
  }

  // Replaces the filter, with a history entry.
  setFilter(text) {
    this.page.pushParams({ filter: text, only: null, "nodes.page": null });
    this.onFilter(text);
    this.render();
    // A link inside the table is gone with its row.
    if (document.activeElement === document.body) this.page.main.focus({ preventScroll: true });
    this.matchBar.scrollIntoView({ block: "nearest" });
  }

  // A link that adds a value to the filter, in place of another value of the same key.
  filterLink(content, key, value) {
    const onClick = (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      this.setFilter(withFilterTerm(this.filter, key, value));
    };
    const target = href([], { filter: withFilterTerm("", key, value) });
    return el("a", { class: "filter", href: target, "data-key": `filter-${key}-${value}`, on: { click: onClick } }, content);
  }

  describe(node) {
    const fleet = this.fleet;
    const validated = fleet.validated(node);
    const [health, state, occupancy, severity] = ["health", "state", "occupancy", "severity"].map((key) => fleet.value(node, key));
    const lines = [
      fleet.name(node),
      `${codeLabel(health)} · ${codeLabel(state)} · ${codeLabel(occupancy)}`,
      validated === null ? "Not fully tested" : `Fully tested: ${formatAge(validated)}`,
    ];
    const reasons = fleet.reasons(node);
    if (reasons.length) lines.push(reasons.map(codeLabel).join(", "));
    if (severity) lines.push(`Worst finding: ${severityText(severity)}`);
    if (this.measurement && this.colourMode.startsWith("metric:"))
      lines.push(`${this.measurement.metric}: ${formatMeasurement(this.measurement.values[fleet.name(node)], this.measurement.unit)}`);
    return lines;
  }

  // Shows a new response of the controller.
  update({ map, tests }) {
    const previous = this.fleet;
    this.fleet = new Fleet(map);
    this.period = Math.max(...tests.filter((test) => test.routine).map((test) => parseDuration(test.cutoff)), 3_600_000);
    if (previous && this.fleet.hasSameLayout(previous, this.group)) this.render();
    else this.layout();
  }

  layout() {
    if (!this.fleet) return;
    this.renderSurroundings();
    this.map.show({
      groups: this.fleet.groups(this.group),
      count: this.fleet.count,
      styles: this.styles,
      styleIndex: this.styleIndex,
      matches: this.matches,
    });
  }

  // Computes the style of each node and whether it matches the filter.
  updateStyles() {
    const { styles, styleOf } = colourScheme(this.fleet, this.colourMode, { period: this.period, measurement: this.measurement });
    const matchesFilter = nodeFilter(this.fleet, this.filter);
    const selected = styles.findIndex((style) => style.code === this.page.query.get("only"));
    this.styles = styles;
    [this.styleIndex, this.matches] = [new Uint8Array(this.fleet.count), new Uint8Array(this.fleet.count)];
    this.matchCount = 0;
    for (let node = 0; node < this.fleet.count; node += 1) {
      this.styleIndex[node] = styleOf(node);
      this.matches[node] = matchesFilter(node) && (selected < 0 || this.styleIndex[node] === selected) ? 1 : 0;
      this.matchCount += this.matches[node];
    }
  }

  // Renders after a change of colour mode, filter, selected style or view.
  render(redrawLabels = false) {
    if (!this.fleet) return;
    this.renderSurroundings();
    this.map.recolour(this.styles, this.styleIndex, this.matches, redrawLabels);
  }

  // Renders everything except the cells of the map.
  renderSurroundings() {
    this.updateStyles();
    const counts = this.styles.map(() => 0);
    for (let node = 0; node < this.fleet.count; node += 1) counts[this.styleIndex[node]] += 1;
    const hidden = this.fleet.count - this.matchCount;
    this.matchText.textContent = hidden
      ? `${formatCount(this.matchCount)} of ${plural(this.fleet.count, "node")} · the filter hides ${formatCount(hidden)}`
      : plural(this.matchCount, "node");
    this.showAllButton.hidden = !hidden && !this.filter;
    this.drawLegend(counts);
    this.drawBreakdown();
    const asTable = this.page.query.get("view") === "table";
    if (this.overview.classList.toggle("as-table", asTable) !== this.listsAreLast) {
      // A table needs the whole width: the lists follow it.
      this.listsAreLast = asTable;
      this.overview[asTable ? "append" : "prepend"](this.overview.querySelector(".overview-lists"));
    }
    const placeholder = (text) => replaceContent(this.container, el("p", { class: "placeholder" }, text));
    if (!this.fleet.count) placeholder("Nodes appear here when the controller has observed the cluster.");
    else if (!this.matchCount) placeholder("No nodes match the filter.");
    else if (asTable) replaceContent(this.container, this.table());
    else if (this.map.element.parentNode !== this.container) replaceContent(this.container, this.map.element);
    this.onRender();
  }

  drawLegend(counts) {
    const selected = this.page.query.get("only");
    const legendJson = JSON.stringify([this.styles, counts, selected]);
    if (legendJson === this.legendJson) return;
    this.legendJson = legendJson;
    const toggleStyle = (code) => {
      this.page.pushParams({ only: selected === code ? null : code, "nodes.page": null });
      this.render();
    };
    replaceContent(
      this.legend,
      ...this.styles.map((style, index) =>
        el(
          "button",
          {
            type: "button",
            class: "legend-item",
            "aria-pressed": String(selected === style.code),
            "data-key": `only-${style.code}`,
            on: { click: () => toggleStyle(style.code) },
          },
          el("span", { class: `swatch ${style.shape}`, style: { "--swatch": style.colour }, "aria-hidden": "true" }),
          `${style.text} `,
          el("span", { class: "dim" }, formatCount(counts[index])),
        ),
      ),
    );
  }

  // Shows what the nodes that match the filter have in common.
  drawBreakdown() {
    this.breakdown.hidden = !this.isFiltered || !this.matchCount;
    if (this.breakdown.hidden) return;
    const inFilter = filterTerms(this.filter).map((term) => term.key);
    const part = ([key, title]) => {
      if (inFilter.includes(key) || !this.fleet.has(key)) return null;
      const { values, indices } = this.fleet.column(key);
      const counts = values.map(() => 0);
      for (let node = 0; node < this.fleet.count; node += 1) counts[indices[node]] += this.matches[node];
      const sorted = values.map((value, index) => [value ?? "none", counts[index]]).filter(([, count]) => count);
      sorted.sort((a, b) => b[1] - a[1]);
      const links = sorted.slice(0, MAX_VALUES).flatMap(([value, count]) => [" ", this.filterLink(`${value} ${formatCount(count)}`, key, value)]);
      return el("span", {}, el("span", { class: "dim" }, `${title}:`), ...links, sorted.length > MAX_VALUES && ` and ${sorted.length - MAX_VALUES} more`);
    };
    replaceContent(this.breakdown, BREAKDOWN.map(part));
  }

  // Failing nodes first, unless another order is chosen.
  table() {
    const fleet = this.fleet;
    const urgency = Float64Array.from({ length: fleet.count }, (_, node) => (this.matches[node] ? fleet.urgency(node) : 0));
    const rows = this.matchingNodes.sort((a, b) => urgency[a] - urgency[b] || a - b);
    const cell = (key, content) => (node) => {
      const value = fleet.value(node, key);
      return value ? this.filterLink(content(value), key, value) : "–";
    };
    const textColumn = (key, heading) => ({
      key,
      title: heading,
      value: (node) => fleet.value(node, key) ?? "",
      cell: cell(key, (value) => value),
    });
    const badgeColumn = (key, heading) => ({ ...textColumn(key, heading), cell: cell(key, (value) => badge(value)) });
    const iso = (node) => (fleet.validated(node) === null ? "" : new Date(fleet.validated(node)).toISOString());
    const columns = [
      { key: "node", title: "Node", value: (node) => fleet.name(node), cell: (node) => nodeLink(fleet.name(node)) },
      badgeColumn("health", "Health"),
      badgeColumn("state", "State"),
      {
        key: "reason",
        title: "Findings",
        value: (node) => fleet.reasons(node).join(" "),
        cell: (node) => fleet.reasons(node).flatMap((code, index) => [index ? ", " : "", this.filterLink(codeLabel(code), "reason", code)]),
      },
      { ...badgeColumn("severity", "Worst finding"), sortValue: (node) => severityRank(fleet.value(node, "severity")) },
      badgeColumn("occupancy", "Occupancy"),
      textColumn("pool", "Pool"),
      fleet.has("rack") && textColumn("rack", "Rack"),
      textColumn("sku", "SKU"),
      { key: "validated", title: "Fully tested", value: iso, cell: (node) => (iso(node) ? timeElement(iso(node)) : "never") },
      this.measurement &&
        this.colourMode.startsWith("metric:") && {
          key: "metric",
          title: this.measurement.metric,
          alignRight: true,
          value: (node) => this.measurement.values[fleet.name(node)] ?? "",
          cell: (node) => formatMeasurement(this.measurement.values[fleet.name(node)], this.measurement.unit),
        },
    ].filter(Boolean);
    return [
      table(this.page, { name: "nodes", caption: "Nodes, failing ones first", columns, rows, emptyText: "No nodes match the filter." }),
      severityLegend(rows.map((node) => fleet.value(node, "severity"))),
    ];
  }
}
