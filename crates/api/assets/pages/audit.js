// The audit trail: who did what, when and why, including rejected requests.

import { get } from "../api.js";
import { LiveSection, searchField } from "../components.js";
import { el, inlineCode, link, nodeLink, replaceContent } from "../dom.js";
import { codeLabel, timeElement } from "../format.js";
import { table } from "../table.js";

export function render(page) {
  const container = el("section", { class: "card" });
  let [entries, pageCount, timer] = [null, 1, null];
  const onFilter = () => {
    clearTimeout(timer);
    timer = setTimeout(() => entries.reload(), 300);
  };
  replaceContent(
    page.main,
    el("h1", {}, "Audit"),
    el("div", { class: "controls" }, searchField(page, "node", "Node", "full node name", onFilter)),
    container,
  );
  const load = async (signal) => {
    const items = [];
    let cursor;
    for (let index = 0; index < pageCount; index += 1) {
      const batch = await get(["audit"], { node: page.query.get("node"), limit: 200, cursor }, signal);
      items.push(...batch.items);
      cursor = batch.next;
      if (!cursor) break;
    }
    return { items, next: cursor };
  };
  const loadMore = () => {
    pageCount += 1;
    entries.reload();
  };
  entries = new LiveSection(page, container, {
    events: ["plan"],
    load,
    render: ({ items, next }) =>
      table(page, {
        name: "audit",
        caption: "The audit trail",
        rows: items,
        loadMore: next ? loadMore : null,
        emptyText: page.query.get("node") ? "No entries for this node." : "No entries yet.",
        columns: [
          { key: "at", title: "When", value: (row) => row.at, cell: (row) => timeElement(row.at) },
          {
            key: "by",
            title: "Who",
            value: (row) => row.by,
            cell: (row) => [row.by, row.origin && el("div", { class: "dim" }, `from ${row.origin}`)],
          },
          { key: "what", title: "What", value: (row) => row.what, cell: (row) => codeLabel(row.what) },
          { key: "node", title: "Node", value: (row) => row.node ?? "", cell: (row) => nodeLink(row.node) },
          {
            key: "case",
            title: "Case",
            value: (row) => row.case ?? "",
            cell: (row) => (row.case ? link(["cases", row.case], row.case) : ""),
          },
          { key: "code", title: "Reason", value: (row) => row.code },
          { key: "text", title: "Why", wide: true, value: (row) => row.text },
          {
            key: "plan",
            title: "Confirmed plan",
            wide: true,
            value: (row) => row.plan ?? "",
            cell: (row) => (row.plan ? el("details", {}, el("summary", {}, "Show"), el("pre", {}, inlineCode(row.plan))) : ""),
          },
        ],
      }),
  });
}
