// Tests: the list, and how the measurements of each are distributed over the fleet, with its outliers.

import { get } from "../api.js";
import { spread } from "../charts.js";
import { el, href, link, nodeLink, swap } from "../dom.js";
import { Part, empty, searchBox, section } from "../frame.js";
import { table } from "../table.js";
import { figure, percent, plural, span } from "../words.js";

function list(page) {
  const place = el("section", { class: "card" });
  swap(page.main, el("h1", {}, "Tests"), place);
  new Part(page, place, {
    kinds: ["status"],
    read: async (signal) => {
      const [tests, coverage] = await Promise.all([get(["tests"], {}, signal), get(["coverage"], {}, signal)]);
      return tests.map((test) => ({ ...test, covered: coverage.find((row) => row.test === test.test)?.percent ?? null }));
    },
    draw: (rows) =>
      table(page, {
        name: "tests",
        caption: "Tests",
        rows,
        nothing: "No tests are enabled.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "title", title: "What it shows", wide: true, value: (row) => row.title },
          {
            key: "covered",
            title: "Covered",
            right: true,
            value: (row) => row.covered ?? "",
            cell: (row) => percent(row.covered),
          },
          { key: "routine", title: "Runs", value: (row) => (row.routine ? "regularly" : "on request") },
          { key: "cutoff", title: "Period", value: (row) => row.cutoff, cell: (row) => span(row.cutoff) },
          { key: "usual", title: "Usual duration", value: (row) => row.usual, cell: (row) => span(row.usual) },
          { key: "limit", title: "Time limit", value: (row) => row.limit, cell: (row) => span(row.limit) },
          { key: "together", title: "Multi-node", value: (row) => (row.together ? "yes" : "no") },
        ],
      }),
  });
}

function outliers(page, { name, unit, spread: of }) {
  if (!of.outliers.length) return el("p", { class: "dim" }, "No outliers.");
  return [
    el(
      "p",
      {},
      `${plural(of.outliers.length + of.more_outliers, "node")} more than four times the usual deviation from the median:`,
    ),
    table(page, {
      name: `outliers-${name}`,
      caption: `Outliers of ${name}`,
      rows: of.outliers,
      usual: "-deviations",
      columns: [
        { key: "node", title: "Node", value: (row) => row.node, cell: (row) => nodeLink(row.node) },
        { key: "value", title: "Value", right: true, value: (row) => row.value, cell: (row) => figure(row.value, unit) },
        {
          key: "deviations",
          title: "Deviation",
          right: true,
          value: (row) => Math.abs(row.deviations),
          cell: (row) => `${row.deviations.toFixed(1)} ×`,
        },
      ],
    }),
  ];
}

function one(page, test) {
  const place = el("div", {});
  let [part, timer] = [null, null];
  const filtered = () => {
    clearTimeout(timer);
    timer = setTimeout(() => part.now(), 400);
  };
  swap(
    page.main,
    el("h1", {}, `Test ${test}`),
    el("div", { class: "controls" }, searchBox(page, "select", "Nodes", "node[01-64], pool=NAME, gpu*", filtered)),
    place,
  );
  part = new Part(page, place, {
    kinds: ["runs"],
    read: async (signal) => {
      const of = await get(["tests", test], { select: page.query.get("select") }, signal);
      // The controller reads the evidence of thousands of nodes in steps.
      if (!of.complete) setTimeout(() => part.soon(), 1000);
      return of;
    },
    draw: (of) => [
      el(
        "p",
        { class: "facts" },
        el("span", {}, `${plural(of.nodes, "node")} with a result`),
        of.coverage && el("span", {}, `covered ${percent(of.coverage.percent)}, target: within ${span(of.coverage.cutoff)}`),
        !of.complete && el("span", { role: "status" }, `measurements of ${plural(of.read, "node")} read so far …`),
      ),
      of.figures.length === 0 && empty(of.nodes ? "This test has no measurements." : "No node has a result of this test yet."),
      ...of.figures.map((each) =>
        section(
          each.name,
          el(
            "p",
            { class: "facts" },
            el("span", {}, `${plural(each.spread.nodes, "node")}`),
            el("span", {}, `90 % from ${figure(each.spread.p5, each.unit)} to ${figure(each.spread.p95, each.unit)}`),
            el("a", { href: href([], { colour: `figure:${test}/${each.name}` }) }, "Show on the map"),
          ),
          spread(each.spread, each.unit),
          outliers(page, each),
        ),
      ),
    ],
  });
}

export const show = (page) => (page.parts[1] ? one(page, page.parts[1]) : list(page));
