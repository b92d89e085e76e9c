// Tables: sorted by clicking a heading, paged, and saved as CSV. The choices are stored in the address.

import { save } from "./api.js";
import { csv } from "./csv.js";
import { el, prose, swap } from "./dom.js";
import { plural } from "./words.js";

const ROWS = 100;

const shownText = (content) => (typeof content === "string" ? prose(content) : content);

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;
  if (b === null || b === undefined || b === "") return -1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: { key, title, value(row) for sorting and CSV, cell(row) for display if it differs, right }. `name` is the file's name and the
// table's prefix in the address. `usual` is the default sort order: a key, with `-` in front for descending. `size` rows are shown per
// page; `more` fetches older ones.
export function table(
  page,
  { name, caption, columns, rows, usual = null, nothing = "No rows.", more = null, size = ROWS },
) {
  const place = el("div", { class: "table" });
  const [sortKey, pageKey] = [`${name}.sort`, `${name}.page`];

  function draw() {
    const sort = page.query.get(sortKey) ?? usual;
    const [key, down] = sort?.startsWith("-") ? [sort.slice(1), true] : [sort, false];
    const by = columns.find((column) => column.key === key);
    const sorted = by
      ? [...rows].sort((a, b) => (down ? compare(by.value(b), by.value(a)) : compare(by.value(a), by.value(b))))
      : rows;
    const pages = Math.max(1, Math.ceil(sorted.length / size));
    const at = Math.min(pages, Math.max(1, Number(page.query.get(pageKey) ?? 1) || 1));
    const shown = sorted.slice((at - 1) * size, at * size);
    const go = (to) => {
      page.say(pageKey, to > 1 ? String(to) : null);
      draw();
    };
    const heading = (column) => {
      const mine = column.key === key;
      const turn = () => {
        page.say(sortKey, mine && !down ? `-${column.key}` : column.key);
        page.say(pageKey, null);
        draw();
      };
      const button = el(
        "button",
        { type: "button", class: "sort", "data-key": `${name}-${column.key}`, on: { click: turn } },
        column.title,
        el("span", { "aria-hidden": "true" }, mine ? (down ? " ▾" : " ▴") : ""),
      );
      const order = mine ? (down ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", class: column.right ? "right" : "", "aria-sort": order }, button);
    };
    const cell = (one, column) => {
      const content = (column.cell ?? column.value)(one) ?? "";
      const kind = [column.right && "right", column.wide && "wide"].filter(Boolean).join(" ");
      // A single element, because on a phone a cell is a title and its content side by side.
      return el("td", { class: kind || null, "data-title": column.title }, content === "" ? null : el("div", {}, shownText(content)));
    };
    const row = (one) => el("tr", {}, ...columns.map((column) => cell(one, column)));
    const export_ = () => {
      const text = csv(
        columns.map((column) => column.title),
        sorted.map((one) => columns.map((column) => column.value(one))),
      );
      save(new Blob([text], { type: "text/csv;charset=utf-8" }), `${name}.csv`);
    };
    const foot = el(
      "div",
      { class: "foot" },
      el("span", { class: "dim" }, plural(rows.length, "row"), more ? " so far" : ""),
      pages > 1 &&
        el(
          "span",
          { class: "pages" },
          el(
            "button",
            { type: "button", disabled: at === 1, "data-key": `${name}-before`, on: { click: () => go(at - 1) } },
            "‹ Previous",
          ),
          ` ${at} of ${pages} `,
          el(
            "button",
            { type: "button", disabled: at === pages, "data-key": `${name}-after`, on: { click: () => go(at + 1) } },
            "Next ›",
          ),
        ),
      more && el("button", { type: "button", "data-key": `${name}-more`, on: { click: more } }, "Load older"),
      el("button", { type: "button", class: "quiet", "data-key": `${name}-csv`, on: { click: export_ } }, "Save as CSV"),
    );
    if (!rows.length) {
      swap(place, el("p", { class: "state" }, nothing));
      return;
    }
    swap(
      place,
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
        el(
          "table",
          {},
          el("caption", { class: "hidden" }, caption),
          el("thead", {}, el("tr", {}, ...columns.map(heading))),
          el("tbody", {}, ...shown.map(row)),
        ),
      ),
      foot,
    );
  }

  draw();
  return place;
}
