// The fleet: how much of it is proven healthy, what is wrong, and every node on one screen, as a map or a table.

import { nodeActions } from "../actions.js";
import { all, get } from "../api.js";
import { badge, severityLegend } from "../colours.js";
import { el, href, link, nodeLink, prose, swap } from "../dom.js";
import { Fleet, filterOf, looksOf } from "../fleet-looks.js";
import { Part, choice, failed, searchBox } from "../frame.js";
import { NodeMap } from "../map.js";
import { table } from "../table.js";
import { ago, figure, moment, percent, plural, severityText, spanMs, tellTime, title, whole } from "../words.js";

const COLOURS = [
  ["health", "Health"],
  ["age", "Age of validation"],
  ["life", "State"],
  ["use", "Use"],
  ["severity", "Worst finding"],
];

function summary({ status, findings, map }) {
  const fleet = new Fleet(map);
  const counts = { pass: 0, fail: 0, unknown: 0 };
  for (let node = 0; node < fleet.count; node += 1) counts[fleet.word(node, "health")] += 1;
  const total = fleet.count;
  const share = total ? (100 * counts.pass) / total : null;
  const wrong = new Map();
  for (const finding of findings.items) wrong.set(finding.reason, (wrong.get(finding.reason) ?? new Set()).add(finding.node));
  const alerts = [
    ...status.troubles,
    status.breaker.state !== "closed" &&
      !status.troubles.some((trouble) => /breaker/i.test(trouble)) &&
      `The circuit breaker is ${status.breaker.state}: ${status.breaker.why ?? "no node is taken out of service"}`,
    ...status.pauses.map(
      (pause) => `Validation ${pause.pool ? `of pool ${pause.pool}` : "of all pools"} is paused by ${pause.by}: ${pause.why}`,
    ),
    status.silent.incident &&
      `${status.silent.silent.length} of ${plural(status.silent.agents, "agent")} stopped reporting: check the network first`,
  ].filter(Boolean);
  const bar = el(
    "div",
    {
      class: "share",
      role: "img",
      "aria-label": `${counts.pass} proven healthy, ${counts.fail} failing, ${counts.unknown} unknown`,
    },
    ...["pass", "fail", "unknown"]
      .filter((code) => counts[code])
      .map((code) => el("span", { class: code, style: { "flex-grow": String(counts[code]) } })),
  );
  const fact = (text, query) => el("a", { href: href([], query) }, text);
  return [
    el(
      "h1",
      {},
      total ? `${whole(counts.pass)} of ${plural(total, "node")} proven healthy` : "No nodes yet",
      total ? el("span", { class: "dim" }, ` · ${percent(share)}`) : "",
    ),
    total > 0 && bar,
    el(
      "p",
      { class: "facts" },
      fact(`✕ ${whole(counts.fail)} failing`, { filter: "health:fail" }),
      fact(`? ${whole(counts.unknown)} unknown`, { filter: "health:unknown" }),
      el("span", {}, `◷ ${whole(status.nodes.overdue)} overdue`),
      el("span", {}, `${status.running.running} of ${status.running.limit} runs active`),
      el("span", {}, `mode: ${status.mode}`),
      el("span", {}, `last observed `, status.seen ? moment(status.seen) : "never"),
    ),
    wrong.size > 0 &&
      el(
        "p",
        { class: "facts" },
        el("strong", {}, "Open problems:"),
        ...[...wrong]
          .sort((a, b) => b[1].size - a[1].size)
          .slice(0, 8)
          .map(([reason, nodes]) => link(["cases"], `${title(reason)} on ${plural(nodes.size, "node")}`)),
      ),
    ...alerts.map((text) => el("p", { class: "alert", role: "alert" }, el("span", { "aria-hidden": "true" }, "⚠ "), prose(text))),
  ];
}

// The map or table, by the choices above it.
class View {
  constructor(page, below) {
    this.page = page;
    this.below = below;
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "Legend" });
    this.matched = el("span", { class: "dim", role: "status" });
    this.map = new NodeMap({
      label: "Map of the nodes: arrow keys move, Enter opens a node, Escape leaves. For a table choose “Table”.",
      open: (node) => (location.hash = href(["nodes", this.fleet.name(node)])),
      describe: (node) => this.describe(node),
    });
    page.hear((kind) => kind === "theme" && this.draw(true));
  }

  get by() {
    return this.page.query.get("colour") ?? "health";
  }

  describe(node) {
    const fleet = this.fleet;
    const validated = fleet.validated(node);
    const [health, life, use, severity] = ["health", "life", "use", "severity"].map((key) => fleet.word(node, key));
    const lines = [
      fleet.name(node),
      `${title(health)} · ${title(life)} · ${title(use)}`,
      validated === null ? "Not fully tested" : `Fully tested: ${ago(validated)}`,
    ];
    if (severity) lines.push(`Worst finding: ${severityText(severity)}`);
    if (this.measured && this.by.startsWith("figure:"))
      lines.push(`${this.measured.figure}: ${figure(this.measured.values[fleet.name(node)], this.measured.unit)}`);
    return lines;
  }

  // Sets new rows from the controller.
  set({ map, tests }) {
    const before = this.fleet;
    this.fleet = new Fleet(map);
    this.period = Math.max(...tests.filter((test) => test.routine).map((test) => spanMs(test.cutoff)), 3_600_000);
    if (before && this.fleet.liesAs(before, this.group)) this.draw();
    else this.layout();
  }

  get group() {
    return this.page.query.get("group") ?? (this.fleet.has("rack") ? "rack" : "pool");
  }

  layout() {
    if (!this.fleet) return;
    this.tell();
    this.map.show({
      groups: this.fleet.groups(this.group),
      count: this.fleet.count,
      looks: this.looks,
      at: this.at,
      lit: this.lit,
    });
  }

  // Computes looks and matching nodes, once for all users.
  look() {
    const { looks, lookOf } = looksOf(this.fleet, this.by, { period: this.period, measured: this.measured });
    const matches = filterOf(this.fleet, this.page.query.get("filter") ?? "");
    const only = looks.findIndex((look) => look.code === this.page.query.get("only"));
    this.looks = looks;
    [this.at, this.lit] = [new Uint8Array(this.fleet.count), new Uint8Array(this.fleet.count)];
    for (let node = 0; node < this.fleet.count; node += 1) {
      this.at[node] = lookOf(node);
      this.lit[node] = matches(node) && (only < 0 || this.at[node] === only) ? 1 : 0;
    }
  }

  // The matching nodes.
  get matching() {
    return Array.from({ length: this.fleet.count }, (_, node) => node).filter((node) => this.lit[node]);
  }

  // Redraws after a choice: colours, filter, legend, or the other view.
  draw(labels = false) {
    if (!this.fleet) return;
    this.tell();
    this.map.recolour(this.looks, this.at, this.lit, labels);
  }

  // Redraws everything except the map itself, and places it.
  tell() {
    this.look();
    const counts = this.looks.map(() => 0);
    let matched = 0;
    for (let node = 0; node < this.fleet.count; node += 1) {
      counts[this.at[node]] += 1;
      matched += this.lit[node];
    }
    this.matched.textContent =
      matched === this.fleet.count
        ? plural(matched, "node")
        : `${whole(matched)} of ${plural(this.fleet.count, "node")}`;
    this.drawLegend(counts);
    if (!this.fleet.count) {
      swap(this.below, el("p", { class: "state" }, "Nodes appear here when the controller has observed the cluster."));
    } else if (this.page.query.get("view") === "table") swap(this.below, this.table());
    else if (this.map.element.parentNode !== this.below) swap(this.below, this.map.element);
  }

  drawLegend(counts) {
    const only = this.page.query.get("only");
    const shown = JSON.stringify([this.looks, counts, only]);
    if (shown === this.legendShown) return;
    this.legendShown = shown;
    const choose = (code) => {
      this.page.say("only", only === code ? null : code);
      this.draw();
    };
    swap(
      this.legend,
      ...this.looks.map((look, place) =>
        el(
          "button",
          {
            type: "button",
            class: "key",
            "aria-pressed": String(only === look.code),
            "data-key": `only-${look.code}`,
            on: { click: () => choose(look.code) },
          },
          el("span", { class: `swatch ${look.mark}`, style: { "--swatch": look.colour }, "aria-hidden": "true" }),
          `${look.text} `,
          el("span", { class: "dim" }, whole(counts[place])),
        ),
      ),
    );
  }

  table() {
    const fleet = this.fleet;
    const rows = this.matching;
    const word = (key, heading) => ({ key, title: heading, value: (node) => fleet.word(node, key) ?? "" });
    const state = (key, heading) => ({
      ...word(key, heading),
      cell: (node) => (fleet.word(node, key) ? badge(fleet.word(node, key)) : "–"),
    });
    const iso = (node) => (fleet.validated(node) === null ? "" : new Date(fleet.validated(node)).toISOString());
    const columns = [
      { key: "node", title: "Node", value: (node) => fleet.name(node), cell: (node) => nodeLink(fleet.name(node)) },
      word("pool", "Pool"),
      fleet.has("rack") && word("rack", "Rack"),
      word("sku", "SKU"),
      state("health", "Health"),
      state("life", "State"),
      state("use", "Use"),
      { key: "validated", title: "Fully tested", value: iso, cell: (node) => (iso(node) ? moment(iso(node)) : "never") },
      state("severity", "Worst finding"),
      this.measured &&
        this.by.startsWith("figure:") && {
          key: "figure",
          title: this.measured.figure,
          right: true,
          value: (node) => this.measured.values[fleet.name(node)] ?? "",
          cell: (node) => figure(this.measured.values[fleet.name(node)], this.measured.unit),
        },
    ].filter(Boolean);
    return [
      table(this.page, { name: "nodes", caption: "Nodes", columns, rows, nothing: "No nodes match the filter." }),
      severityLegend(rows.map((node) => fleet.word(node, "severity"))),
    ];
  }
}

// "Colour by" also offers the measurements of each test, which are fetched when one of them is chosen.
function colourChoice(page, view, tests) {
  const figures = el("span", {});
  const options = [...COLOURS, ...tests.map((test) => [`figure:${test.test}`, `Measurement of ${test.test}`])];
  const [, of, name] = view.by.match(/^figure:([^/]+)(?:\/(.*))?$/) ?? [];
  const fetchFigure = async (test, wanted) => {
    view.measured = null;
    try {
      const { figures: known } = await get(["tests", test], {}, page.signal);
      if (!known.length) {
        swap(figures, el("span", { class: "dim" }, "No measurements yet"));
        return;
      }
      const chosen = known.some((one) => one.name === wanted) ? wanted : known[0].name;
      const select = el(
        "select",
        { "data-key": "figure", name: "figure" },
        ...known.map((one) => el("option", { value: one.name, selected: one.name === chosen }, one.name)),
      );
      select.addEventListener("change", () => fetchFigure(test, select.value));
      swap(figures, el("label", { class: "choice" }, el("span", {}, "Measurement"), select));
      view.measured = await get(["tests", test, "values"], { figure: chosen }, page.signal);
      page.say("colour", `figure:${test}/${chosen}`);
    } catch (error) {
      if (error.name !== "AbortError") swap(figures, failed(error));
    }
    view.draw();
  };
  const shown = el("span", { class: "choices" });
  const select = el(
    "select",
    { "data-key": "colour", name: "colour" },
    ...options.map(([code, text]) =>
      el("option", { value: code, selected: code === view.by || code === `figure:${of}` }, text),
    ),
  );
  select.addEventListener("change", () => {
    page.say("colour", select.value === "health" ? null : select.value);
    page.say("only", null);
    swap(figures);
    if (select.value.startsWith("figure:")) fetchFigure(select.value.slice(7));
    else view.draw();
  });
  shown.append(el("label", { class: "choice" }, el("span", {}, "Colour by"), select), figures);
  if (of) fetchFigure(of, name);
  return shown;
}

export function show(page) {
  const head = el("section", { class: "summary" });
  const controls = el("div", { class: "controls" });
  const below = el("div", { class: "below" });
  const body = el("div", { class: "card" }, controls, below);
  const view = new View(page, below);
  swap(page.main, head, body);

  const build = (tests) => {
    const chosen = () => view.matching.slice(0, 256).map((node) => view.fleet.name(node));
    controls.append(
      searchBox(page, "filter", "Filter", "name, gpu*, health:fail, life:held, pool:…", () => view.draw()),
      choice(
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
      colourChoice(page, view, tests),
      choice(
        page,
        "view",
        "View",
        [
          ["map", "Map"],
          ["table", "Table"],
        ],
        "map",
        () => view.draw(),
      ),
      view.matched,
      view.legend,
      el("div", {}, nodeActions(page, chosen, () => {}) ?? ""),
    );
  };
  let drawn = false;
  new Part(page, head, {
    kinds: ["nodes", "runs", "cases", "status"],
    read: async (signal) => {
      const [status, map, tests, findings] = await Promise.all([
        get(["status"], {}, signal),
        get(["map"], {}, signal),
        get(["tests"], {}, signal),
        all(["findings"], {}, signal, 1000),
      ]);
      return { status, map, tests, findings };
    },
    draw: (data) => {
      tellTime(data.status.at);
      view.set(data);
      if (!drawn) build(data.tests);
      drawn = true;
      return summary(data);
    },
  });
}
