// The list of tests, and one test: the distribution of its measurements over the fleet, and the outliers.

import { get } from "../api.js";
import { histogram } from "../charts.js";
import { LiveSection, emptyView, searchField, section } from "../components.js";
import { el, href, link, nodeLink, replaceContent } from "../dom.js";
import { formatMeasurement, formatPercent, plural, shortDuration } from "../format.js";
import { table } from "../table.js";

function renderList(page) {
  const container = el("section", { class: "card" });
  replaceContent(page.main, el("h1", {}, "Tests"), container);
  new LiveSection(page, container, {
    events: ["status"],
    load: async (signal) => {
      const [tests, coverage] = await Promise.all([get(["tests"], {}, signal), get(["coverage"], {}, signal)]);
      return tests.map((test) => ({ ...test, covered: coverage.find((row) => row.test === test.test)?.percent ?? null }));
    },
    render: (rows) =>
      table(page, {
        name: "tests",
        caption: "Tests",
        rows,
        emptyText: "No tests are enabled.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "title", title: "Description", wide: true, value: (row) => row.title },
          {
            key: "covered",
            title: "Covered",
            alignRight: true,
            value: (row) => row.covered ?? "",
            cell: (row) => formatPercent(row.covered),
          },
          { key: "routine", title: "Schedule", value: (row) => (row.routine ? "regularly" : "on request") },
          { key: "cutoff", title: "Period", value: (row) => row.cutoff, cell: (row) => shortDuration(row.cutoff) },
          { key: "typical-duration", title: "Typical duration", value: (row) => row.typical_duration, cell: (row) => shortDuration(row.typical_duration) },
          { key: "limit", title: "Time limit", value: (row) => row.limit, cell: (row) => shortDuration(row.limit) },
          { key: "multi-node", title: "Multi-node", value: (row) => (row.multi_node ? "yes" : "no") },
        ],
      }),
  });
}

function renderOutliers(page, { name, unit, distribution }) {
  if (!distribution.outliers.length) return el("p", { class: "dim" }, "No outliers.");
  return [
    el(
      "p",
      {},
      `${plural(distribution.outliers.length + distribution.more_outliers, "node")} more than four deviations from the median:`,
    ),
    table(page, {
      name: `outliers-${name}`,
      caption: `Outliers of ${name}`,
      rows: distribution.outliers,
      defaultSort: "-deviations",
      columns: [
        { key: "node", title: "Node", value: (row) => row.node, cell: (row) => nodeLink(row.node) },
        { key: "value", title: "Value", alignRight: true, value: (row) => row.value, cell: (row) => formatMeasurement(row.value, unit) },
        {
          key: "deviations",
          title: "Deviation",
          alignRight: true,
          value: (row) => Math.abs(row.deviations),
          cell: (row) => `${row.deviations.toFixed(1)} ×`,
        },
      ],
    }),
  ];
}

const percentile = ({ distribution, unit }, key) => formatMeasurement(distribution[key], unit);

function renderTest(page, test) {
  const container = el("div", {});
  let [content, timer] = [null, null];
  const onFilter = () => {
    clearTimeout(timer);
    timer = setTimeout(() => content.reload(), 400);
  };
  replaceContent(
    page.main,
    el("h1", {}, `Test ${test}`),
    el("div", { class: "controls" }, searchField(page, "select", "Nodes", "node[01-64], pool=NAME, gpu*", onFilter)),
    container,
  );
  content = new LiveSection(page, container, {
    events: ["runs"],
    load: async (signal) => {
      const response = await get(["tests", test], { select: page.query.get("select") }, signal);
      // The controller reads the results of thousands of nodes in steps.
      if (!response.complete) setTimeout(() => content.scheduleReload(), 1000);
      return response;
    },
    render: (response) => [
      el(
        "p",
        { class: "facts" },
        el("span", {}, `${plural(response.nodes, "node")} with a result`),
        response.coverage &&
          el("span", {}, `covered ${formatPercent(response.coverage.percent)}, target: within ${shortDuration(response.coverage.cutoff)}`),
        !response.complete && el("span", { role: "status" }, `measurements of ${plural(response.read, "node")} read so far …`),
      ),
      response.measurements.length === 0 &&
        emptyView(response.nodes ? "This test has no measurements." : "No node has a result of this test yet."),
      ...response.measurements.map((measurement) =>
        section(
          measurement.name,
          el(
            "p",
            { class: "facts" },
            el("span", {}, `${plural(measurement.distribution.nodes, "node")}`),
            el("span", {}, `90 % from ${percentile(measurement, "p5")} to ${percentile(measurement, "p95")}`),
            el("a", { href: href([], { colour: `metric:${test}/${measurement.name}` }) }, "Show on the map"),
          ),
          histogram(measurement.distribution, measurement.unit),
          renderOutliers(page, measurement),
        ),
      ),
    ],
  });
}

export const render = (page) => (page.parts[1] ? renderTest(page, page.parts[1]) : renderList(page));
