// Everything that needs an operator, most urgent first, as `doctor status` lists it.

import { URGENCIES, command, textWithNodes } from "../attention.js";
import { get } from "../api.js";
import { badge } from "../colours.js";
import { LiveSection } from "../components.js";
import { el, link, replaceContent } from "../dom.js";
import { timeElement } from "../format.js";
import { table } from "../table.js";

export function render(page) {
  const container = el("section", { class: "card", "aria-label": "Attention" });
  replaceContent(
    page.main,
    el("h1", {}, "Attention"),
    el("p", { class: "dim" }, "What needs an operator, most urgent first, each with the next command."),
    container,
  );
  new LiveSection(page, container, {
    events: ["nodes", "runs", "cases", "status"],
    load: async (signal) => (await get(["status"], {}, signal)).attention,
    render: (rows) =>
      table(page, {
        name: "attention",
        caption: "What needs an operator",
        rows,
        emptyText: "No open problems.",
        columns: [
          {
            key: "urgency",
            title: "Urgency",
            value: (row) => row.urgency,
            sortValue: (row) => URGENCIES.indexOf(row.urgency),
            cell: (row) => badge(row.urgency),
          },
          { key: "text", title: "What", wide: true, value: (row) => row.text, cell: (row) => textWithNodes(row.text, row.nodes) },
          { key: "nodes", title: "Nodes", alignRight: true, value: (row) => row.nodes.length || "" },
          { key: "since", title: "Since", value: (row) => row.since ?? "", cell: (row) => timeElement(row.since) },
          { key: "next", title: "Next command", wide: true, value: (row) => row.next ?? "", cell: (row) => (row.next ? command(row.next) : "") },
          {
            key: "case",
            title: "Case",
            value: (row) => row.case ?? "",
            cell: (row) => (row.case ? link(["cases", row.case], row.case) : ""),
          },
        ],
      }),
  });
}
