// What the next cycle would do and why, and for every other node, why not.

import { get } from "../api.js";
import { el, href, nodeLink, swap } from "../dom.js";
import { Part, choice, searchBox, section } from "../frame.js";
import { table } from "../table.js";
import { moment, plural, title } from "../words.js";

function passedOver(page, rows) {
  const codes = new Map();
  for (const row of rows) codes.set(row.code, (codes.get(row.code) ?? 0) + 1);
  const below = el("div", {});
  const draw = () => {
    const [code, text] = [page.query.get("code"), (page.query.get("node") ?? "").toLowerCase()];
    swap(
      below,
      table(page, {
        name: "passed-over",
        caption: "Skipped nodes",
        usual: "node",
        nothing: "No nodes match.",
        rows: rows.filter((row) => (!code || row.code === code) && row.node.toLowerCase().includes(text)),
        columns: [
          { key: "node", title: "Node", value: (row) => row.node, cell: (row) => nodeLink(row.node) },
          { key: "code", title: "Reason", value: (row) => row.code, cell: (row) => title(row.code) },
          { key: "why", title: "Why", wide: true, value: (row) => row.why },
        ],
      }),
    );
  };
  draw();
  const sorted = [...codes].sort((a, b) => b[1] - a[1]);
  return [
    el(
      "p",
      { class: "facts" },
      ...sorted.map(([code, count]) =>
        el("a", { href: href(page.parts, { code }) }, `${title(code)} ${count.toLocaleString("en")}`),
      ),
    ),
    el(
      "div",
      { class: "controls" },
      choice(page, "code", "Reason", [["", "All"], ...sorted.map(([code]) => [code, title(code)])], "", draw),
      searchBox(page, "node", "Node", "part of a name", draw),
    ),
    below,
  ];
}

export function show(page) {
  const place = el("div", {});
  swap(page.main, place);
  new Part(page, place, {
    kinds: ["plan"],
    read: (signal) => get(["plan"], {}, signal),
    draw: ({ at, actions, passed_over: passed }) => [
      el("h1", {}, actions.length ? `${plural(actions.length, "action")} in the next cycle` : "No actions in the next cycle"),
      el("p", { class: "dim" }, "Planned from the cluster state observed ", moment(at), ". Viewing the plan does not carry it out."),
      section(
        "Actions",
        table(page, {
          name: "plan",
          caption: "Actions",
          rows: actions,
          nothing: "No test is due on a free node, and no repair step is pending.",
          columns: [
            { key: "action", title: "Action", value: (row) => title(row.action) },
            {
              key: "nodes",
              title: "Nodes",
              value: (row) => row.nodes ?? "",
              cell: (row) => (row.nodes && /^[^,[\]]+$/.test(row.nodes) ? nodeLink(row.nodes) : (row.nodes ?? "")),
            },
            { key: "what", title: "What", value: (row) => row.what },
            { key: "code", title: "Reason", value: (row) => title(row.code) },
            { key: "why", title: "Why", wide: true, value: (row) => row.why },
          ],
        }),
      ),
      section(`Skipped: ${plural(passed.length, "node")}`, passedOver(page, passed)),
    ],
  });
}
