// The fleet: health, open problems, and all nodes as a map or a table.

import { nodeActionButtons } from "../actions.js";
import { get, getAll } from "../api.js";
import { badge, severityLegend } from "../colours.js";
import { LiveSection, errorView, searchField, selectField } from "../components.js";
import { el, href, inlineCode, link, nodeLink, replaceContent } from "../dom.js";
import { Fleet, colourScheme, nodeFilter } from "../fleet-model.js";
import {
  codeLabel,
  formatAge,
  formatCount,
  formatMeasurement,
  formatPercent,
  parseDuration,
  plural,
  setClusterTime,
  severityRank,
  severityText,
  timeElement,
} from "../format.js";
import { NodeMap } from "../node-map.js";
import { table } from "../table.js";

const COLOUR_MODES = [
  ["health", "Health"],
  ["age", "Age of validation"],
  ["state", "State"],
  ["occupancy", "Occupancy"],
  ["severity", "Worst finding"],
];

function renderSummary({ status, findings, map }) {
  const fleet = new Fleet(map);
  const counts = { pass: 0, fail: 0, unknown: 0 };
  for (let node = 0; node < fleet.count; node += 1) counts[fleet.value(node, "health")] += 1;
  const total = fleet.count;
  const healthyPercent = total ? (100 * counts.pass) / total : null;
  const nodesByReason = new Map();
  for (const { reason, node } of findings.items) nodesByReason.set(reason, (nodesByReason.get(reason) ?? new Set()).add(node));
  const healthBar = el(
    "div",
    {
      class: "stacked-bar",
      role: "img",
      "aria-label": `${counts.pass} proven healthy, ${counts.fail} failing, ${counts.unknown} unknown`,
    },
    ...["pass", "fail", "unknown"]
      .filter((code) => counts[code])
      .map((code) => el("span", { class: code, style: { "flex-grow": String(counts[code]) } })),
  );
  const filterLink = (text, query) => el("a", { href: href([], query) }, text);
  return [
    el(
      "h1",
      {},
      total ? `${formatCount(counts.pass)} of ${plural(total, "node")} proven healthy` : "No nodes yet",
      total ? el("span", { class: "dim" }, ` · ${formatPercent(healthyPercent)}`) : "",
    ),
    total > 0 && healthBar,
    el(
      "p",
      { class: "facts" },
      filterLink(`✕ ${formatCount(counts.fail)} failing`, { filter: "health:fail" }),
      filterLink(`? ${formatCount(counts.unknown)} unknown`, { filter: "health:unknown" }),
      el("span", {}, `◷ ${formatCount(status.nodes.overdue)} overdue`),
      el("span", {}, `${status.running.running} of ${status.running.limit} runs active`),
      el("span", {}, `mode: ${status.mode}`),
      el("span", {}, `last observed `, status.observed_at ? timeElement(status.observed_at) : "never"),
    ),
    nodesByReason.size > 0 &&
      el(
        "p",
        { class: "facts" },
        el("strong", {}, "Open problems:"),
        ...[...nodesByReason]
          .sort((a, b) => b[1].size - a[1].size)
          .slice(0, 8)
          .map(([reason, nodes]) => link(["cases"], `${codeLabel(reason)} on ${plural(nodes.size, "node")}`)),
      ),
    ...status.attention.map((item) =>
      el(
        "p",
        item.urgency === "notice" ? { class: "facts" } : { class: "alert", role: "alert" },
        item.urgency === "notice" ? "" : el("span", { "aria-hidden": "true" }, "⚠ "),
        inlineCode(item.next ? `${item.text}; \`${item.next}\`` : item.text),
      ),
    ),
  ];
}

// The map or table of nodes, its legend and the number of matching nodes.
class FleetView {
  constructor(page, container) {
    this.page = page;
    this.container = container;
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Legend" });
    this.matchText = el("span", { class: "dim", role: "status" });
    this.map = new NodeMap({
      label: "Map of the nodes: arrow keys move, Enter opens a node, Escape leaves. For a table choose “Table”.",
      open: (node) => (location.hash = href(["nodes", this.fleet.name(node)])),
      describe: (node) => this.describe(node),
    });
    page.onEvent((name) => name === "theme" && this.render(true));
  }

  get colourMode() {
    return this.page.query.get("colour") ?? "health";
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

  get group() {
    return this.page.query.get("group") ?? (this.fleet.has("rack") ? "rack" : "pool");
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
    const matchesFilter = nodeFilter(this.fleet, this.page.query.get("filter") ?? "");
    const selected = styles.findIndex((style) => style.code === this.page.query.get("only"));
    this.styles = styles;
    [this.styleIndex, this.matches] = [new Uint8Array(this.fleet.count), new Uint8Array(this.fleet.count)];
    for (let node = 0; node < this.fleet.count; node += 1) {
      this.styleIndex[node] = styleOf(node);
      this.matches[node] = matchesFilter(node) && (selected < 0 || this.styleIndex[node] === selected) ? 1 : 0;
    }
  }

  get matchingNodes() {
    return Array.from({ length: this.fleet.count }, (_, node) => node).filter((node) => this.matches[node]);
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
    let matched = 0;
    for (let node = 0; node < this.fleet.count; node += 1) {
      counts[this.styleIndex[node]] += 1;
      matched += this.matches[node];
    }
    this.matchText.textContent =
      matched === this.fleet.count
        ? plural(matched, "node")
        : `${formatCount(matched)} of ${plural(this.fleet.count, "node")}`;
    this.drawLegend(counts);
    if (!this.fleet.count) {
      replaceContent(this.container, el("p", { class: "placeholder" }, "Nodes appear here when the controller has observed the cluster."));
    } else if (this.page.query.get("view") === "table") replaceContent(this.container, this.table());
    else if (this.map.element.parentNode !== this.container) replaceContent(this.container, this.map.element);
  }

  drawLegend(counts) {
    const selected = this.page.query.get("only");
    const legendJson = JSON.stringify([this.styles, counts, selected]);
    if (legendJson === this.legendJson) return;
    this.legendJson = legendJson;
    const toggleStyle = (code) => {
      this.page.setParam("only", selected === code ? null : code);
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

  table() {
    const fleet = this.fleet;
    const rows = this.matchingNodes;
    const textColumn = (key, heading) => ({ key, title: heading, value: (node) => fleet.value(node, key) ?? "" });
    const badgeColumn = (key, heading) => ({
      ...textColumn(key, heading),
      cell: (node) => (fleet.value(node, key) ? badge(fleet.value(node, key)) : "–"),
    });
    const iso = (node) => (fleet.validated(node) === null ? "" : new Date(fleet.validated(node)).toISOString());
    const columns = [
      { key: "node", title: "Node", value: (node) => fleet.name(node), cell: (node) => nodeLink(fleet.name(node)) },
      textColumn("pool", "Pool"),
      fleet.has("rack") && textColumn("rack", "Rack"),
      textColumn("sku", "SKU"),
      badgeColumn("health", "Health"),
      badgeColumn("state", "State"),
      badgeColumn("occupancy", "Occupancy"),
      { key: "validated", title: "Fully tested", value: iso, cell: (node) => (iso(node) ? timeElement(iso(node)) : "never") },
      { ...badgeColumn("severity", "Worst finding"), sortValue: (node) => severityRank(fleet.value(node, "severity")) },
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
      table(this.page, { name: "nodes", caption: "Nodes", columns, rows, emptyText: "No nodes match the filter." }),
      severityLegend(rows.map((node) => fleet.value(node, "severity"))),
    ];
  }
}

// The "Colour by" field. It includes the measurements of each test, which are fetched when selected.
function colourField(page, view, tests) {
  const measurementField = el("span", {});
  const options = [...COLOUR_MODES, ...tests.map((test) => [`metric:${test.test}`, `Measurement of ${test.test}`])];
  const [, selectedTest, name] = view.colourMode.match(/^metric:([^/]+)(?:\/(.*))?$/) ?? [];
  const loadMeasurement = async (test, wanted) => {
    view.measurement = null;
    try {
      const { measurements } = await get(["tests", test], {}, page.signal);
      if (!measurements.length) {
        replaceContent(measurementField, el("span", { class: "dim" }, "No measurements yet"));
        return;
      }
      const chosen = measurements.some(({ name: known }) => known === wanted) ? wanted : measurements[0].name;
      const select = el(
        "select",
        { "data-key": "metric", name: "metric" },
        ...measurements.map(({ name: known }) => el("option", { value: known, selected: known === chosen }, known)),
      );
      select.addEventListener("change", () => loadMeasurement(test, select.value));
      replaceContent(measurementField, el("label", { class: "choice" }, el("span", {}, "Measurement"), select));
      view.measurement = await get(["tests", test, "values"], { metric: chosen }, page.signal);
      page.setParam("colour", `metric:${test}/${chosen}`);
    } catch (error) {
      if (error.name !== "AbortError") replaceContent(measurementField, errorView(error));
    }
    view.render();
  };
  const field = el("span", { class: "choices" });
  const select = el(
    "select",
    { "data-key": "colour", name: "colour" },
    ...options.map(([code, text]) =>
      el("option", { value: code, selected: code === view.colourMode || code === `metric:${selectedTest}` }, text),
    ),
  );
  select.addEventListener("change", () => {
    page.setParam("colour", select.value === "health" ? null : select.value);
    page.setParam("only", null);
    replaceContent(measurementField);
    if (select.value.startsWith("metric:")) loadMeasurement(select.value.slice(7));
    else view.render();
  });
  field.append(el("label", { class: "choice" }, el("span", {}, "Colour by"), select), measurementField);
  if (selectedTest) loadMeasurement(selectedTest, name);
  return field;
}

export function render(page) {
  const summaryContainer = el("section", { class: "summary" });
  const controls = el("div", { class: "controls" });
  const container = el("div", { class: "fleet-nodes" });
  const body = el("div", { class: "card" }, controls, container);
  const view = new FleetView(page, container);
  replaceContent(page.main, summaryContainer, body);

  const addControls = (tests) => {
    // Without a filter no node is preselected: a command on the whole fleet has to be typed.
    const matchingNames = () => {
      const matching = view.matchingNodes;
      return matching.length === view.fleet.count ? [] : matching.slice(0, 256).map((node) => view.fleet.name(node));
    };
    controls.append(
      searchField(page, "filter", "Filter", "name, gpu*, health:fail, state:held, pool:…", () => view.render()),
      selectField(
        page,
        "group",
        "Group by",
        [
          ["pool", "Pool"],
          ["rack", "Rack"],
          ["sku", "SKU"],
          ["none", "Nothing"],
        ],
        view.fleet.has("rack") ? "rack" : "pool",
        () => view.layout(),
      ),
      colourField(page, view, tests),
      selectField(
        page,
        "view",
        "View",
        [
          ["map", "Map"],
          ["table", "Table"],
        ],
        "map",
        () => view.render(),
      ),
      view.matchText,
      view.legend,
      el("div", {}, nodeActionButtons(page, matchingNames, () => {}) ?? ""),
    );
  };
  let controlsAdded = false;
  new LiveSection(page, summaryContainer, {
    events: ["nodes", "runs", "cases", "status"],
    load: async (signal) => {
      const [status, map, tests, findings] = await Promise.all([
        get(["status"], {}, signal),
        get(["map"], {}, signal),
        get(["tests"], {}, signal),
        getAll(["findings"], {}, signal, 1000),
      ]);
      return { status, map, tests, findings };
    },
    render: (data) => {
      setClusterTime(data.status.at);
      view.update(data);
      if (!controlsAdded) addControls(data.tests);
      controlsAdded = true;
      return renderSummary(data);
    },
  });
}
