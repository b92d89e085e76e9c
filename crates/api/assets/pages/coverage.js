// The share of nodes with a conclusive result of each test within its period.

import { get } from "../api.js";
import { stackedBar } from "../charts.js";
import { LiveSection } from "../components.js";
import { el, link, replaceContent } from "../dom.js";
import { formatPercent, plural, shortDuration } from "../format.js";
import { table } from "../table.js";

// Test statuses: the field of a row, the CSS class and the label.
const STATUSES = [
  ["pass", "pass", "Pass"],
  ["fail", "fail", "Fail"],
  ["inconclusive", "inconclusive", "Inconclusive"],
  ["stale", "stale", "Stale"],
  ["never_tested", "never-tested", "Never tested"],
  ["not_applicable", "not-applicable", "Not applicable"],
  ["not_judged", "not-judged", "Not judged"],
];

export function render(page) {
  const container = el("section", { class: "card" });
  replaceContent(
    page.main,
    el("h1", {}, "Coverage"),
    el(
      "p",
      { class: "dim" },
      "Target: every node that a test applies to has a conclusive result (pass or fail) no older than the test's period. " +
        "Inconclusive results do not count.",
    ),
    container,
  );
  new LiveSection(page, container, {
    events: ["nodes", "runs", "status"],
    load: (signal) => get(["coverage"], {}, signal),
    render: (rows) => {
      const label = (row) => `${row.test}: ${STATUSES.map(([key, , text]) => `${row[key]} ${text.toLowerCase()}`).join(", ")}`;
      const notCovered = (row) => Math.max(0, row.nodes - row.not_applicable - row.not_judged - row.covered);
      return table(page, {
        name: "coverage",
        caption: "Coverage of each test",
        rows,
        emptyText: "No regular tests. The policy's suites and periods define them.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "cutoff", title: "Target: within", value: (row) => row.cutoff, cell: (row) => shortDuration(row.cutoff) },
          {
            key: "percent",
            title: "Covered",
            alignRight: true,
            value: (row) => row.percent,
            cell: (row) => el("strong", {}, formatPercent(row.percent)),
          },
          {
            key: "bar",
            title: "Nodes",
            wide: true,
            value: (row) => row.nodes,
            cell: (row) =>
              stackedBar(
                STATUSES.map(([key, code]) => [code, row[key]]),
                label(row),
              ),
          },
          {
            key: "not_covered",
            title: "Not covered",
            alignRight: true,
            value: notCovered,
            cell: (row) => (notCovered(row) ? plural(notCovered(row), "node") : "✓ target met"),
          },
          ...STATUSES.map(([key, , text]) => ({ key, title: text, alignRight: true, value: (row) => row[key] })),
        ],
      });
    },
  });
}
