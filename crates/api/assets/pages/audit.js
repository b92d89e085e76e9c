// The audit trail: who did what, when and why, including rejected requests.

import { get } from "../api.js";
import { el, link, nodeLink, swap } from "../dom.js";
import { Part, searchBox } from "../frame.js";
import { table } from "../table.js";
import { moment, title } from "../words.js";

export function show(page) {
  const place = el("section", { class: "card" });
  let [part, pages, timer] = [null, 1, null];
  const filtered = () => {
    clearTimeout(timer);
    timer = setTimeout(() => part.now(), 300);
  };
  swap(
    page.main,
    el("h1", {}, "Audit"),
    el("div", { class: "controls" }, searchBox(page, "node", "Node", "full node name", filtered)),
    place,
  );
  const read = async (signal) => {
    const items = [];
    let cursor;
    for (let turn = 0; turn < pages; turn += 1) {
      const some = await get(["audit"], { node: page.query.get("node"), limit: 200, cursor }, signal);
      items.push(...some.items);
      cursor = some.next;
      if (!cursor) break;
    }
    return { items, next: cursor };
  };
  const more = () => {
    pages += 1;
    part.now();
  };
  part = new Part(page, place, {
    kinds: ["plan"],
    read,
    draw: ({ items, next }) =>
      table(page, {
        name: "audit",
        caption: "The audit trail",
        rows: items,
        more: next ? more : null,
        nothing: page.query.get("node") ? "No entries for this node." : "No entries yet.",
        columns: [
          { key: "at", title: "When", value: (row) => row.at, cell: (row) => moment(row.at) },
          {
            key: "by",
            title: "Who",
            value: (row) => row.by,
            cell: (row) => [row.by, row.origin && el("div", { class: "dim" }, `from ${row.origin}`)],
          },
          { key: "what", title: "What", value: (row) => row.what, cell: (row) => title(row.what) },
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
            cell: (row) => (row.plan ? el("details", {}, el("summary", {}, "Show"), el("pre", {}, row.plan)) : ""),
          },
        ],
      }),
  });
}
