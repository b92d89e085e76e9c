// The fleet: health, what needs an operator, the open cases, and all nodes as a map or a table.

import { nodeActionButtons } from "../actions.js";
import { attentionList, caseList } from "../attention.js";
import { get } from "../api.js";
import { LiveSection, errorView, searchField, selectField } from "../components.js";
import { el, href, replaceContent } from "../dom.js";
import { Fleet } from "../fleet-model.js";
import { FleetView } from "../fleet-view.js";
import { codeLabel, formatCount, formatPercent, plural, setClusterTime, timeElement } from "../format.js";

const COLOUR_MODES = [
  ["health", "Health"],
  ["age", "Age of validation"],
  ["state", "State"],
  ["occupancy", "Occupancy"],
  ["severity", "Worst finding"],
];
const MAX_REASONS = 8;
const MAX_TESTS = 4;
// Nodes that a command may name; the controller accepts no more.
const MAX_SELECTED = 256;

function healthCounts(fleet) {
  const counts = { pass: 0, fail: 0, unknown: 0 };
  for (let node = 0; node < fleet.count; node += 1) counts[fleet.value(node, "health")] += 1;
  return counts;
}

function healthBar(counts) {
  return el(
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
}

// Which tests do not cover every node within their period, lowest coverage first, and why.
function validationLine(rows) {
  const gaps = (row) => [
    [row.stale, "stale"],
    [row.never_tested, "never tested"],
    [row.inconclusive, "inconclusive"],
  ];
  const below = rows.filter((row) => gaps(row).some(([count]) => count > 0)).sort((a, b) => a.percent - b.percent);
  const test = (row) => {
    const why = gaps(row).filter(([count]) => count > 0);
    return el(
      "span",
      {},
      el("a", { href: href(["tests", row.test]) }, `${row.test} ${formatPercent(row.percent)}`),
      el("span", { class: "dim" }, ` (${why.map(([count, name]) => `${formatCount(count)} ${name}`).join(", ")})`),
    );
  };
  if (!rows.length) return null;
  return el(
    "p",
    { class: "facts validation" },
    el("strong", {}, "Validated in time:"),
    ...(below.length ? below.slice(0, MAX_TESTS).map(test) : [el("span", {}, "every node, by every test")]),
    below.length > MAX_TESTS && el("a", { href: href(["coverage"]) }, `and ${plural(below.length - MAX_TESTS, "more test")}`),
  );
}

function renderSummary({ status, map }, view) {
  const fleet = new Fleet(map);
  const [counts, total] = [healthCounts(fleet), fleet.count];
  const reasons = fleet.findingGroups("reason");
  const states = status.nodes.states.filter(([state, count]) => count > 0 && state !== "in-service");
  return [
    el(
      "h1",
      {},
      total ? `${formatCount(counts.pass)} of ${plural(total, "node")} proven healthy` : "No nodes yet",
      total ? el("span", { class: "dim" }, ` · ${formatPercent((100 * counts.pass) / total)}`) : "",
    ),
    total > 0 && healthBar(counts),
    el(
      "p",
      { class: "facts" },
      view.filterLink(`✕ ${formatCount(counts.fail)} failing`, "health", "fail"),
      view.filterLink(`? ${formatCount(counts.unknown)} unknown`, "health", "unknown"),
      ...states.map(([state, count]) => view.filterLink(`${codeLabel(state)} ${formatCount(count)}`, "state", state)),
      el("a", { href: href(["coverage"]) }, `◷ ${formatCount(status.nodes.overdue)} overdue`),
      el("span", {}, `${status.running.running} of ${status.running.limit} runs active`),
      el("span", {}, `mode: ${status.mode}`),
      el("span", {}, "last observed ", status.observed_at ? timeElement(status.observed_at) : "never"),
    ),
    reasons.length > 0 &&
      el(
        "p",
        { class: "facts" },
        el("strong", {}, "Findings:"),
        ...reasons
          .slice(0, MAX_REASONS)
          .map(({ name, nodes }) => view.filterLink(`${codeLabel(name)} on ${plural(nodes.size, "node")}`, "reason", name)),
        reasons.length > MAX_REASONS && el("a", { href: href(["cases"]) }, `and ${reasons.length - MAX_REASONS} more reasons`),
      ),
    total > 0 && validationLine(status.coverage),
  ];
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

// The commands on the nodes that the filter shows. Without a filter they name no node: a command on the whole fleet is typed.
function addActions(page, view, container) {
  const selectsNodes = () => view.isFiltered && view.matchCount <= MAX_SELECTED;
  const selected = () => (selectsNodes() ? view.matchingNodes.map((node) => view.fleet.name(node)) : []);
  const buttons = nodeActionButtons(page, selected, () => {});
  if (!buttons) return;
  const text = el("span", { class: "dim" });
  view.onRender = () => {
    if (selectsNodes() && view.matchCount) text.textContent = `For ${plural(view.matchCount, "node")} shown:`;
    else text.textContent = view.isFiltered && view.matchCount ? `Over ${MAX_SELECTED} nodes match: name the nodes` : "Filter to select nodes, or name them";
  };
  view.onRender();
  container.append(el("div", { class: "node-actions" }, text, buttons));
}

export function render(page) {
  const summaryContainer = el("section", { class: "summary", "aria-label": "Health" });
  const [attentionContainer, casesContainer] = ["Needs an operator", "Open cases"].map((name) =>
    el("section", { class: "card", "aria-label": name }),
  );
  const controls = el("div", { class: "controls" });
  const container = el("div", { class: "fleet-nodes" });
  const overview = el(
    "div",
    { class: "overview" },
    el("div", { class: "overview-lists" }, attentionContainer, casesContainer),
    el("section", { class: "card", "aria-label": "Nodes" }, el("h2", {}, "Nodes"), controls, container),
  );
  const view = new FleetView(page, container, overview);
  replaceContent(page.main, summaryContainer, overview);

  const addControls = (tests) => {
    const search = searchField(page, "filter", "Filter", "name, health:fail, reason:…", () => view.render());
    const input = search.querySelector("input");
    view.onFilter = (text) => (input.value = text);
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      // One node is left: open it.
      if (view.matchCount === 1) view.open(view.matchingNodes[0]);
      else container.querySelector(".map, .scroll")?.focus();
    });
    controls.append(
      search,
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
      view.matchBar,
      view.legend,
      view.breakdown,
    );
    addActions(page, view, controls);
    if (page.focusSearch) input.focus();
  };

  let attention = [];
  let cases = null;
  // The cases are read after the first painting of the nodes, which must not wait for them.
  const showCases = () => {
    cases = new LiveSection(page, casesContainer, {
      events: ["cases"],
      load: async (signal) => ({ ...(await get(["cases"], { limit: 500 }, signal)), attention }),
      render: ({ items, next }) => caseList(items, attention, next === null),
    });
  };
  replaceContent(attentionContainer, el("h2", {}, "Needs an operator"));
  replaceContent(casesContainer, el("h2", {}, "Open cases"));
  new LiveSection(page, summaryContainer, {
    events: ["nodes", "runs", "cases", "status"],
    load: async (signal) => {
      const [status, map, tests] = await Promise.all([
        get(["status"], {}, signal),
        get(["map"], {}, signal),
        get(["tests"], {}, signal),
      ]);
      return { status, map, tests };
    },
    render: (data) => {
      setClusterTime(data.status.at);
      view.update(data);
      const changed = JSON.stringify(attention) !== JSON.stringify(data.status.attention);
      attention = data.status.attention;
      if (!cases || changed) replaceContent(attentionContainer, attentionList(attention));
      if (!cases) {
        addControls(data.tests);
        showCases();
      } else if (changed) cases.scheduleReload();
      return renderSummary(data, view);
    },
  });
}
