// How much of the cluster each test covers, against its target: every node within the test's period.

import { get } from "../api.js";
import { stack } from "../charts.js";
import { el, link, swap } from "../dom.js";
import { Part } from "../frame.js";
import { table } from "../table.js";
import { percent, plural, span } from "../words.js";

const STANDINGS = [
  ["pass", "pass", "Pass"],
  ["fail", "fail", "Fail"],
  ["inconclusive", "inconclusive", "Inconclusive"],
  ["stale", "stale", "Stale"],
  ["never_tested", "never-tested", "Never tested"],
  ["not_applicable", "not-applicable", "Not applicable"],
];

export function show(page) {
  const place = el("section", { class: "card" });
  swap(
    page.main,
    el("h1", {}, "Coverage"),
    el(
      "p",
      { class: "dim" },
      "Target: every node that a test applies to has a conclusive result (pass or fail) no older than the test's period. Inconclusive results do not count.",
    ),
    place,
  );
  new Part(page, place, {
    kinds: ["nodes", "runs", "status"],
    read: (signal) => get(["coverage"], {}, signal),
    draw: (rows) => {
      const label = (row) => `${row.test}: ${STANDINGS.map(([key, , text]) => `${row[key]} ${text.toLowerCase()}`).join(", ")}`;
      const missing = (row) => Math.max(0, row.nodes - row.not_applicable - row.covered);
      return table(page, {
        name: "coverage",
        caption: "Coverage of each test",
        rows,
        nothing: "No regular tests. The policy's suites and periods define them.",
        columns: [
          { key: "test", title: "Test", value: (row) => row.test, cell: (row) => link(["tests", row.test], row.test) },
          { key: "cutoff", title: "Target: within", value: (row) => row.cutoff, cell: (row) => span(row.cutoff) },
          {
            key: "percent",
            title: "Covered",
            right: true,
            value: (row) => row.percent,
            cell: (row) => el("strong", {}, percent(row.percent)),
          },
          {
            key: "bar",
            title: "Nodes",
            wide: true,
            value: (row) => row.nodes,
            cell: (row) =>
              stack(
                STANDINGS.map(([key, code]) => [code, row[key]]),
                label(row),
              ),
          },
          {
            key: "missing",
            title: "Missing",
            right: true,
            value: missing,
            cell: (row) => (missing(row) ? plural(missing(row), "node") : "✓ reached"),
          },
          ...STANDINGS.map(([key, , text]) => ({ key, title: text, right: true, value: (row) => row[key] })),
        ],
      });
    },
  });
}
