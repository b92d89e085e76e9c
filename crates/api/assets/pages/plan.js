// The actions of the next cycle with their reasons, and the reason for each skipped node.

import { get } from "../api.js";
import { LiveSection, searchField, section, selectField } from "../components.js";
import { el, href, nodeLink, replaceContent } from "../dom.js";
import { codeLabel, plural, timeElement } from "../format.js";
import { table } from "../table.js";

function renderSkipped(page, rows) {
  const codes = new Map();
  for (const row of rows) codes.set(row.code, (codes.get(row.code) ?? 0) + 1);
  const tableContainer = el("div", {});
  const renderTable = () => {
    const [code, text] = [page.query.get("code"), (page.query.get("node") ?? "").toLowerCase()];
    replaceContent(
      tableContainer,
      table(page, {
        name: "skipped",
        caption: "Skipped nodes",
        defaultSort: "node",
        emptyText: "No nodes match.",
        rows: rows.filter((row) => (!code || row.code === code) && row.node.toLowerCase().includes(text)),
        columns: [
          { key: "node", title: "Node", value: (row) => row.node, cell: (row) => nodeLink(row.node) },
          { key: "code", title: "Reason", value: (row) => row.code, cell: (row) => codeLabel(row.code) },
          { key: "why", title: "Why", wide: true, value: (row) => row.why },
        ],
      }),
    );
  };
  renderTable();
  const sorted = [...codes].sort((a, b) => b[1] - a[1]);
  return [
    el(
      "p",
      { class: "facts" },
      ...sorted.map(([code, count]) =>
        el("a", { href: href(page.parts, { code }) }, `${codeLabel(code)} ${count.toLocaleString("en")}`),
      ),
    ),
    el(
      "div",
      { class: "controls" },
      selectField(page, "code", "Reason", [["", "All"], ...sorted.map(([code]) => [code, codeLabel(code)])], "", renderTable),
      searchField(page, "node", "Node", "part of a name", renderTable),
    ),
    tableContainer,
  ];
}

export function render(page) {
  const container = el("div", {});
  replaceContent(page.main, container);
  new LiveSection(page, container, {
    events: ["plan"],
    load: (signal) => get(["plan"], {}, signal),
    render: ({ at, actions, skipped }) => [
      el("h1", {}, actions.length ? `${plural(actions.length, "action")} in the next cycle` : "No actions in the next cycle"),
      el("p", { class: "dim" }, "Planned from the cluster state observed ", timeElement(at), ". Viewing the plan does not carry it out."),
      section(
        "Actions",
        table(page, {
          name: "plan",
          caption: "Actions",
          rows: actions,
          emptyText: "No test is due on a free node, and no repair step is pending.",
          columns: [
            { key: "action", title: "Action", value: (row) => codeLabel(row.action) },
            {
              key: "nodes",
              title: "Nodes",
              value: (row) => row.nodes ?? "",
              cell: (row) => (row.nodes && /^[^,[\]]+$/.test(row.nodes) ? nodeLink(row.nodes) : (row.nodes ?? "")),
            },
            { key: "what", title: "What", value: (row) => row.what },
            { key: "code", title: "Reason", value: (row) => codeLabel(row.code) },
            { key: "why", title: "Why", wide: true, value: (row) => row.why },
          ],
        }),
      ),
      section(`Skipped: ${plural(skipped.length, "node")}`, renderSkipped(page, skipped)),
    ],
  });
}
